"""Memory of one rank of the actor, at every moment of an update that could be its worst.

What is trained, its gradients and AdamW's two moments are float32 and sharded by whole rows over the ranks
(gkd.actor.model, gkd.actor.optimizer); what is computed with is gathered in the compute type, a layer at a time, the
root for as long as a micro-batch takes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from gkd.config import Algorithm, Lora
from gkd.planning.activations import backward_working, saved
from gkd.planning.adapters import adapter_weights
from gkd.planning.logits import logit_bytes
from gkd.planning.shape import ModelShape

F32 = 4
NF4 = 0.5 + 0.127 / 8  # with twice quantized scales: 0.127 bits a number (QLoRA, arXiv 2305.14314, section 3)
NAMES = (
    "weights", "gradients", "optimizer state", "gathered weights", "activations", "logits", "targets",
    "gradients in flight", "optimizer's temporaries",
)  # fmt: skip
Phase = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MicroBatch:
    """What one micro-batch holds: ``tokens``, ``positions`` of responses, K ``targets`` at each of them.

    ``alone``: it is the only one of its optimizer step, so no gradient is there before its backward pass.
    """

    tokens: int
    positions: int
    targets: int = 0
    alone: bool = False


@dataclass(frozen=True, slots=True)
class Training:
    """How the actor trains: what of its settings bears on memory. ``compute`` is the type's size in bytes."""

    algorithm: Algorithm
    world: int
    compute: int
    checkpointing: bool
    loss_chunk: int
    lora: Lora
    sharded: bool = True
    """Whether FSDP2 holds the model; without it nothing is gathered."""
    frozen: int = F32
    """Bytes of a number of what is under an adapter."""
    offloaded: bool = False
    """Whether parameters, gradients and moments are in the host's memory."""


def phases(shape: ModelShape, training: Training, micro: MicroBatch) -> dict[str, Phase]:
    """Bytes by item at each moment that could be the worst."""
    c, standing = training.compute, _standing(shape, training)
    before = dict(standing) | ({"gradients": 0.0} if micro.alone else {})
    forward = before | _forward(shape, training, micro)
    chunk = min(training.loss_chunk, max(1, micro.positions))
    rows = 2 * micro.positions * shape.hidden * c  # of the response positions, and as much beside them
    going, coming = logit_bytes(training.algorithm, shape.vocabulary, chunk, c)
    whole, so_far = _head_gradient(shape, training, micro)
    stream = c * shape.hidden * micro.tokens
    recomputed = max(saved(shape, c, _rank(training)).layers) * micro.tokens if training.checkpointing else 0.0
    working = stream + recomputed + backward_working(shape, c) * micro.tokens
    quantized = training.lora.quantize is not None
    reduced = (c + F32) * shape.largest_layer if training.sharded and training.lora.r is None else 0
    # The present one and the next; of 4-bit ones a matrix at a time.
    layers = float(c * shape.largest_weight if quantized else 2 * c * shape.largest_layer if training.sharded else 0)
    held = c * shape.head if whole and (shape.tied or training.sharded or micro.alone) else 0
    return {
        "loss": forward | {"logits": going + rows},
        "loss, backward": forward | {"logits": coming + rows, "gradients in flight": so_far},
        "head, backward": forward | {
            "logits": chunk * shape.vocabulary * F32 + rows, "gradients in flight": whole
        },
        "layers, backward": forward | {
            "gathered weights": forward["gathered weights"] + layers,
            "activations": forward["activations"] + working,
            "gradients in flight": float(held + reduced),
        },
        "end of backward": standing | {
            "gathered weights": forward["gathered weights"],
            "gradients in flight": _root_gradient(shape, training),
            "targets": forward["targets"],
        },
        "optimizer": standing
        | {"optimizer's temporaries": 0.0 if training.offloaded else 2.0 * F32 * _largest_trained(shape, training)},
    }  # fmt: skip


def worst(shape: ModelShape, training: Training, micro: MicroBatch) -> dict[str, float]:
    """The items of the worst moment, in order; names that are 0 in it are left out."""
    moment = max(phases(shape, training, micro).values(), key=lambda phase: sum(phase.values()))
    return {name: moment[name] for name in NAMES if moment.get(name)}


def _rank(training: Training) -> int:
    return training.lora.r or 0


def on_host(shape: ModelShape, training: Training) -> float:
    """Bytes that a rank has in its host's memory: all that is there between micro-batches, where it is offloaded."""
    whole, there = (_standing(shape, replace(training, offloaded=offloaded)) for offloaded in (False, True))
    return sum(whole.values()) - sum(there.values()) if training.offloaded else 0.0


def checkpoint_copy(shape: ModelShape, training: Training) -> float:
    """Bytes of the host's memory that a rank's copy of what is trained, with its moments, takes while it is written."""
    return 3 * _standing(shape, replace(training, offloaded=False))["gradients"]


def _standing(shape: ModelShape, training: Training) -> dict[str, float]:
    """What is there between micro-batches: weights, gradients, and two moments of what is trained."""
    whole, packed = shape.sharded(training.world), 0.0
    if training.lora.quantize is not None:  # every rank has them all (gkd.actor.quantize)
        linear = [(kind.count, w) for kind in shape.layers for w in kind.weights if w.linear]
        whole -= sum(count * w.shard(training.world) for count, w in linear)
        packed = NF4 * sum(count * w.size for count, w in linear)
    adapters = sum(count * w.shard(training.world) for count, w in adapter_weights(shape, training.lora))
    trained = whole if training.lora.r is None else adapters
    if training.offloaded:
        return {"weights": packed, "gradients": 0.0, "optimizer state": 0.0}
    return {
        "weights": float((F32 if training.lora.r is None else training.frozen) * whole + F32 * adapters + packed),
        "gradients": float(F32 * trained),
        "optimizer state": float(2 * F32 * trained),
    }


def _forward(shape: ModelShape, training: Training, micro: MicroBatch) -> dict[str, float]:
    """Gathered weights, and what is kept for the backward pass."""
    c = training.compute
    kept = saved(shape, c, _rank(training))
    a_token = kept.outside
    for layers, one in zip(shape.layers, kept.layers, strict=True):
        a_token += layers.count * (c * shape.hidden if training.checkpointing else one)
    gathered = c * shape.n_root if training.sharded else 0  # the root's; layers come and go
    return {
        "gathered weights": float(gathered),
        "activations": a_token * micro.tokens,
        "targets": float(micro.positions * micro.targets * (8 + F32)),  # ids are int64
    }


def _head_gradient(shape: ModelShape, training: Training, micro: MicroBatch) -> tuple[float, float]:
    """Of the head's weight: at the end of a chunk's backward pass, and during it.

    With several chunks autograd holds the sum so far, the next chunk's and their new sum.
    """
    if training.lora.r is not None:
        return 0.0, 0.0
    one = float(training.compute * shape.head)
    return (3 * one, one) if micro.positions > training.loss_chunk else (one, 0.0)


def _root_gradient(shape: ModelShape, training: Training) -> float:
    """Of embeddings and head when the backward pass ends: tied ones are summed; FSDP2 reduces them in float32."""
    if training.lora.r is not None:
        return 0.0
    c = training.compute
    summed = c * shape.head * (3 if shape.tied else 1)
    return float(max(summed, (c + F32) * shape.n_root) if training.sharded else summed)


def _largest_trained(shape: ModelShape, training: Training) -> int:
    trained = shape.weights() if training.lora.r is None else (w for _, w in adapter_weights(shape, training.lora))
    return max((w.shard(training.world) for w in trained), default=0)

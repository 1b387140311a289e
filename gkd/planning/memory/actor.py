"""Memory of one rank of the actor, at every moment of an update that could be its worst.

What is trained, its gradients and AdamW's two moments are float32 and sharded by whole rows over the ranks
(gkd.actor.model, gkd.actor.optimizer); what is computed with is gathered in the compute type, a layer at a time, the
root for as long as a micro-batch takes. Activations are what autograd saves of every operation, and nothing is fitted;
tests/planning/memory/test_actor.py measures the same in real updates.

Widths: H hidden, I feed-forward, h and g query and key-value heads, D head size; ``c`` is the size in bytes of a number
of the compute type (4 on a CPU, 2 in bfloat16). A norm works in float32 whatever that is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from gkd.config import Config, Lora
from gkd.config.actor import Offloaded
from gkd.planning.layout import F32
from gkd.planning.shapes import Layers, ModelShape, Weight

NF4 = 0.5 + 0.127 / 8  # with twice quantized scales: 0.127 bits a number (QLoRA, arXiv 2305.14314, section 3)
NAMES = (
    "weights", "gradients", "optimizer state", "gathered weights", "activations", "logits", "targets",
    "gradients in flight", "weights being sent",
)  # fmt: skip
ON_THE_WAY = 3.0 * 2 * F32 * (1 << 24)  # slices of moments that come from the host's memory (gkd.actor.optimizer)
# Float32 copies of logits that finding a nucleus takes. On a CPU: sorted, their probabilities, the sums of these, and a
# temporary. On a GPU torch.sort itself takes more: sorted values, their ids of 8 bytes, ids in order, and buffers of
# values and ids for the radix sort.
NUCLEUS_CPU, NUCLEUS_GPU = 4, 8
MASKED = 4  # without a sort, as rollout.top_k and rollout.min_p need none: what is left out, and what stays normalised
Phase = Mapping[str, float]


@dataclass(frozen=True, slots=True)
class MicroBatchSize:
    """Holds the size of one micro-batch: ``tokens``, ``positions`` of responses, K ``targets`` at each of these.

    ``alone``: it is the only one of its optimizer step, so no gradient is there before its backward pass.
    ``more_keys``: keys of its attention beside those of its tokens, where samples have a prompt in common.
    """

    tokens: int
    positions: int
    targets: int = 0
    alone: bool = False
    more_keys: int = 0


@dataclass(frozen=True, slots=True)
class Training:
    """Holds what the actor's memory follows from beside the model; ``compute`` is the bytes of a number of its type.

    ``world``: ranks that hold one copy of the student together. ``sharded``: whether FSDP2 holds the model; without it
    there are copies of all weights in the compute type. ``on_cpu``: whether it is a CPU that computes, where nothing is
    offloaded.
    """

    config: Config
    world: int
    compute: int
    on_cpu: bool = True
    sharded: bool = True

    @property
    def lora(self) -> Lora:
        """Return the settings of the adapters."""
        return self.config.actor.lora

    @property
    def offloaded(self) -> Offloaded | None:
        """Return what is in the host's memory: moments alone (optimizer), or gradients and weights too (weights)."""
        return None if self.on_cpu else self.config.actor.offloaded


def peak_items(shape: ModelShape, training: Training, micro: MicroBatchSize, sent: float = 0.0) -> dict[str, float]:
    """Return the bytes by item at the worst moment of a step, in order; items that are 0 then are left out.

    ``sent``: what sending the weights takes, once the gradients are gone.
    """
    push = _persistent_items(shape, training, training.offloaded) | {"gradients": 0.0, "weights being sent": sent}
    moment = max((*phases(shape, training, micro).values(), push), key=lambda phase: sum(phase.values()))
    return {name: moment[name] for name in NAMES if moment.get(name)}


def phases(shape: ModelShape, training: Training, micro: MicroBatchSize) -> dict[str, Phase]:
    """Return the bytes by item at each moment that could be the worst."""
    c, lora, persistent = training.compute, training.lora, _persistent_items(shape, training, training.offloaded)
    actor = training.config.actor
    before = dict(persistent) | ({"gradients": 0.0} if micro.alone else {})
    forward = before | _forward(shape, training, micro)
    chunk = min(actor.loss_chunk, max(1, micro.positions))
    rows = 2 * micro.positions * shape.hidden * c  # of the response positions, and their gradients
    logits = logit_bytes(training.config, shape.vocabulary, chunk, c, training.on_cpu)
    head_gradient = 0.0 if lora.r is not None else float(c * shape.head)
    if not shape.plain_head:  # autograd: a gradient beside the logits, and a chunk's of the head beside two sums
        logits, head_gradient = logits + chunk * shape.vocabulary * c, 3 * head_gradient
    stream = c * shape.hidden * micro.tokens
    recomputed = max(saved_activations(shape, c, lora.r).layers) * micro.tokens if actor.gradient_checkpointing else 0
    # Gradients of a layer's feed-forward part (both factors of the product) and of the residual stream.
    working = stream + recomputed + c * (2 * shape.widest_mlp + shape.hidden) * micro.tokens
    quantized = lora.quantize is not None
    reduced = 0.0 if lora.r is not None else float((c + F32 if training.sharded else c) * shape.largest_layer)
    # The present one and the next; of 4-bit ones a matrix at a time.
    layers = float(c * shape.largest_matrix if quantized else 2 * c * shape.largest_layer if training.sharded else 0)
    # The last layer that goes backward: all other gradients are there but the embeddings', which a tied head's are too.
    a_layer = max(saved_activations(shape, c, lora.r).layers) if not actor.gradient_checkpointing else c * shape.hidden
    embeddings = 0.0 if shape.tied or lora.r is not None else F32 * shape.head / training.world
    held = 0 if head_gradient == 0 or not (shape.tied or training.sharded or micro.alone) else shape.head
    held *= c if shape.tied or training.sharded else F32  # the weight's own, and no gradient was there before
    return {
        "loss": forward | {"logits": logits + rows, "gradients in flight": head_gradient},
        "layers, backward": forward | {
            "gathered weights": forward["gathered weights"] + layers,
            "activations": forward["activations"] + working,
            "gradients in flight": float(held + reduced),
        },
        "first layer, backward": persistent | {
            "gathered weights": forward["gathered weights"] + layers,
            "gradients": max(0.0, persistent["gradients"] - embeddings),
            "activations": a_layer * micro.tokens + working,
            "targets": forward["targets"],
            "gradients in flight": float(reduced),
        },
        "end of backward": persistent | {
            "gathered weights": forward["gathered weights"],
            "gradients in flight": _root_gradient(shape, training),
            "targets": forward["targets"],
        },
        "optimizer": persistent | ({"optimizer state": ON_THE_WAY} if training.offloaded == "optimizer" else {}),
    }  # fmt: skip


def offloaded_bytes(shape: ModelShape, training: Training) -> float:
    """Return the bytes that a rank has in its host's memory, of what is there between micro-batches."""
    if training.offloaded is None:
        return 0.0
    whole, on_gpu = (_persistent_items(shape, training, offloaded) for offloaded in (None, training.offloaded))
    return sum(whole.values()) - sum(on_gpu.values())


def checkpoint_bytes(shape: ModelShape, training: Training) -> float:
    """Return the bytes of the host's memory that a rank's copy of its trained weights and moments takes when saved."""
    return 3 * _persistent_items(shape, training, None)["gradients"]


def _persistent_items(shape: ModelShape, training: Training, offloaded: Offloaded | None) -> dict[str, float]:
    """Return what is there between micro-batches: weights, gradients, and two moments of what is trained."""
    frozen = F32 if training.on_cpu else training.compute  # of the weights under an adapter
    whole, packed = shape.shard_size(training.world), 0.0
    if training.lora.quantize is not None:  # every rank has them all (gkd.actor.quantize)
        linear = [(kind.count, w) for kind in shape.layers for w in kind.weights if w.linear]
        whole -= sum(count * w.shard_size(training.world) for count, w in linear)
        packed = NF4 * sum(count * w.size for count, w in linear)
    adapters = sum(count * w.shard_size(training.world) for count, w in adapter_weights(shape, training.lora))
    trained = whole if training.lora.r is None else adapters
    if offloaded == "weights":
        return {"weights": packed, "gradients": 0.0, "optimizer state": 0.0}
    return {
        "weights": float((F32 if training.lora.r is None else frozen) * whole + F32 * adapters + packed),
        "gradients": float(F32 * trained),
        "optimizer state": 0.0 if offloaded else float(2 * F32 * trained),
    }


def _forward(shape: ModelShape, training: Training, micro: MicroBatchSize) -> dict[str, float]:
    """Return gathered weights, and what is kept for the backward pass."""
    c = training.compute
    activations = saved_activations(shape, c, training.lora.r)
    a_token = activations.outside
    for layers, layer_bytes in zip(shape.layers, activations.layers, strict=True):
        a_token += layers.count * (c * shape.hidden if training.config.actor.gradient_checkpointing else layer_bytes)
    at_once = 1 if training.config.actor.gradient_checkpointing else shape.n_layers
    heads = shape.kv_heads + (shape.heads if training.on_cpu else 0)  # there queries and results are copied, too
    copied = 2 * c * heads * shape.head_dim * micro.more_keys * at_once
    gathered = c * (shape.n_root if training.sharded else count_copied_numbers(shape, training))  # layers' come and go
    return {
        "gathered weights": float(gathered),
        "activations": a_token * micro.tokens + copied,
        "targets": float(micro.positions * micro.targets * (8 + F32)),  # ids are int64
    }


def count_copied_numbers(shape: ModelShape, training: Training) -> float:
    """Return how many numbers a rank that holds all of the student has once more (gkd.actor.compute_copies)."""
    if training.compute == F32:
        return 0.0
    adapters = sum(count * w.size for count, w in adapter_weights(shape, training.lora))
    if training.lora.r is not None and not training.on_cpu:  # what is under them is in the compute type itself
        return adapters
    linear = (kind.count * w.size for kind in shape.layers for w in kind.weights if w.linear)
    return adapters + shape.shard_size(1) - (sum(linear) if training.lora.quantize is not None else 0)


def _root_gradient(shape: ModelShape, training: Training) -> float:
    """Return the bytes of gradients of embeddings and head when the backward pass ends.

    Tied ones are summed; FSDP2 reduces them in float32.
    """
    if training.lora.r is not None:
        return 0.0
    c = training.compute
    summed = c * shape.head * (3 if shape.tied else 1)
    return float(max(summed, (c + F32) * shape.n_root) if training.sharded else summed)


def adapter_weights(shape: ModelShape, lora: Lora) -> list[tuple[int, Weight]]:
    """List the two weights of rank r beside every targeted linear layer (gkd.actor.lora), with the number of layers
    that have the like; empty without a rank.
    """
    if lora.r is None:
        return []
    weights = []
    for layers in shape.layers:
        for w in layers.weights:
            if w.linear and _is_target(w.name, lora.target_modules):
                both = Weight(f"{w.name}.A", lora.r, w.cols), Weight(f"{w.name}.B", w.rows, lora.r)
                weights += [(layers.count, part) for part in both]
    return weights


def _is_target(name: str, targets: str | list[str]) -> bool:
    """Return whether peft adapts a layer: by name, or by a regular expression over the whole path."""
    if targets == "all-linear":
        return True
    if isinstance(targets, str):
        return re.fullmatch(targets, f"model.layers.0.{name}") is not None
    return any(name == target or name.endswith(f".{target}") for target in targets)


@dataclass(frozen=True, slots=True)
class SavedActivations:
    """Holds the bytes a token that are kept: by each kind of layers (aligned with the shape's), and outside of them."""

    layers: tuple[float, ...]
    outside: float


def saved_activations(shape: ModelShape, c: int, lora_r: int | None = None) -> SavedActivations:
    """Return what a forward pass without gradient checkpointing keeps for its backward pass.

    With an adapter of rank ``lora_r`` norms are frozen and keep less, and every adapted matrix keeps r numbers more.
    """
    rope = 0 if shape.kind == "gpt2" else 2 * shape.head_dim * c
    # The final norm and its result; ids and positions are int64, one each.
    outside = _norm(shape, shape.hidden, c, lora_r is not None) + c * shape.hidden + rope + 16
    return SavedActivations(tuple(_layer(shape, kind, c, lora_r) for kind in shape.layers), outside)


def _layer(shape: ModelShape, layers: Layers, c: int, lora_r: int | None) -> float:
    frozen = lora_r is not None
    adapters = c * (lora_r or 0) * sum(w.linear for w in layers.weights)
    norms = shape.norms * _norm(shape, shape.hidden, c, frozen)
    inputs = 2 * c * shape.hidden  # of the projections to queries, keys and values, and of the feed-forward part
    return norms + inputs + _attention(shape, c, frozen) + _mlp(shape, layers, c) + adapters


def _norm(shape: ModelShape, width: int, c: int, frozen: bool) -> float:
    """Return the bytes of one norm over ``width`` numbers, without its result, which the next operation keeps.

    RMS: the input in float32 and one number a row; the normalised input, which the weight's gradient needs, in the
    compute type (Llama) or in float32 (Gemma). LayerNorm: the input as it is, mean and deviation.
    """
    if shape.norm == "layer":
        return c * width + 2 * F32
    normalised = 0 if frozen else (F32 if shape.norm == "gemma" else c) * width
    return F32 * width + normalised + F32


def _attention(shape: ModelShape, c: int, frozen: bool) -> float:
    """Return the bytes of queries, keys, values, the result (the last projection's input), and a logsumexp a head."""
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    n_bytes = float(2 * c * queries + 2 * c * keys + F32 * shape.heads)
    if shape.qk_norm:
        rows = shape.heads + shape.kv_heads
        n_bytes += rows * _norm(shape, shape.head_dim, c, frozen)
    return n_bytes


def _mlp(shape: ModelShape, layers: Layers, c: int) -> float:
    """Return the bytes of the feed-forward part.

    Gated: gate, activated gate, up, their product. Of GELU as Python writes it: x, x / 2, tanh, 1 + tanh, result.
    """
    numbers = {"gated": 4, "gelu_new": 5, "gelu": 2}[shape.mlp] * layers.width
    if (experts := layers.experts) is None:
        return float(c * numbers)
    # Every expert gathers its tokens, and its result is weighed; the router's probabilities are float32.
    return c * (numbers + experts.per_token * 2 * shape.hidden) + 2 * F32 * experts.count


def logit_bytes(config: Config, vocabulary: int, chunk: int, c: int, on_cpu: bool = True) -> float:
    """Return the bytes of a chunk's logits [chunk, V] and of what is worked out from them, a block at a time.

    The logits, which their gradient replaces, are of the compute type; in bfloat16 a block of them is there once more,
    converted to float32.
    """
    block = min(chunk, config.algorithm.loss.selected_class.block_rows(vocabulary, on_cpu, config.actor.has_room))
    copies = logit_copies(config, vocabulary, on_cpu) + (c < F32)
    return float(vocabulary * (chunk * c + block * copies * F32))


def logit_copies(config: Config, vocabulary: int, on_cpu: bool = True) -> int:
    """Count the float32 [block, V] that gkd.losses has at the worst moment of a block.

    Tokens' own log-probabilities and divergences over K tokens (gkd.losses.outcomes): scaled logits, their softmax and
    its gradient, and one softmax more that waits for each further of them. What a divergence over the whole vocabulary
    has is its own (:attr:`gkd.losses.divergence.Divergence.logit_copies`). Leaving tokens out takes its copies beside a
    log-softmax, while the softmaxes of what came before wait.
    """
    algorithm = config.algorithm
    n_token_losses = algorithm.needs_policy + (algorithm.cross_entropy_weight > 0)
    copies = 3 + (n_token_losses if algorithm.distils else n_token_losses - 1)
    if algorithm.distils:
        loss = algorithm.loss
        if loss.compares_tokens_alone or loss.top_k is None or loss.top_k >= vocabulary:
            copies = max(copies, loss.selected_class.logit_copies)
    if truncation := _truncation_copies(config, on_cpu):
        before = algorithm.distils + (0 if algorithm.needs_policy else n_token_losses)
        copies = max(copies, 1 + truncation + before)
    return copies


def _truncation_copies(config: Config, on_cpu: bool) -> int:
    """Count the copies that leaving tokens out takes, as the sampler did; 0 where it left none out."""
    rollout = config.rollout
    if rollout.top_p < 1.0:
        return NUCLEUS_CPU if on_cpu else NUCLEUS_GPU
    truncates = rollout.top_k is not None or rollout.min_p > 0.0
    return MASKED if truncates and config.algorithm.needs_policy else 0

"""Over how many GPUs vLLM divides a model, and what sequences take of its cache there.

vLLM keeps the keys and values of all tokens of a layer that attends to all, of one with a window those of the window,
and of one with a state that alone, in a block that is made large enough for it. It puts layers of one kind into groups
of as many layers each, which take blocks from one pool (vllm.v1.core.kv_cache_utils,
_get_kv_cache_groups_uniform_page_size).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

from gkd.planning.shapes import ModelShape

BLOCK = 16  # tokens of a block of vLLM's cache on a GPU
LATENT_BLOCK = 128  # that blocks of latent attention are multiples of beside states
PADDED_TO = 64  # rows of an embedding in vLLM (vllm.model_executor.layers.vocab_parallel_embedding)
STEPS_AT_ONCE = 2  # vLLM schedules a step while the one before it runs


@dataclass(frozen=True, slots=True)
class CacheUse:
    """Holds the bytes that sequences of one length take on each GPU.

    ``first``: what vLLM asks for before it takes one, whose prompt may be in the steps that run, so that no window has
    passed over it. ``further``: of each one beside it. Both are equal without windows.
    """

    first: int
    further: int

    def count_in(self, cache: float) -> int:
        """Count the sequences that ``cache`` bytes hold."""
        return 0 if cache < self.first else 1 + int((cache - self.first) // self.further)

    def bytes_of(self, n: int) -> int:
        """Return the bytes of ``n`` sequences, one at least."""
        return self.first + (n - 1) * self.further


def find_width_obstacle(shape: ModelShape, tp: int) -> str:
    """Return what vLLM cannot divide over ``tp`` GPUs, empty where there is nothing.

    GPUs share attention heads out evenly, and key-value heads, or each of those goes to equally many GPUs
    (vllm.model_executor.layers.linear, QKVParallelLinear); latent attention has none.
    """
    setting, kv_heads = f"tensor_parallel_size={tp}", shape.kv_heads
    if shape.heads % tp:
        return f"{setting} does not divide {shape.heads} attention heads"
    if not shape.latent and kv_heads % tp and tp % kv_heads:
        return f"{setting} neither divides {kv_heads} key-value heads nor is a multiple of them"
    dense = (kind.width for kind in shape.layers if kind.experts is None)
    if width := next((width for width in dense if width % tp), 0):
        return f"{setting} does not divide the {width} columns of a feed-forward part"
    if (rows := -(-shape.vocabulary // PADDED_TO) * PADDED_TO) % tp:
        return f"{setting} does not divide the {rows} rows that the vocabulary is padded to"
    return ""


def kv_bytes(shape: ModelShape, tp: int, c: int) -> int:
    """Return the bytes of one token in the cache of one GPU, where every layer attends to all tokens.

    More GPUs than key-value heads repeat these. A latent vector that keys and values are computed from is on every GPU.
    """
    heads = max(1, -(-shape.kv_heads // tp))
    return shape.n_layers * c * (shape.latent or 2 * heads * shape.head_dim)


def state_bytes(shape: ModelShape, tp: int, c: int) -> int:
    """Return the bytes that a sequence takes on one GPU for the states of all layers, however long it is."""
    return -(-shape.states.n_layers * shape.states.layer_bytes(c) // tp)


def sequence_bytes(shape: ModelShape, tp: int, c: int, length: float) -> int:
    """Return the bytes of a sequence of ``length`` tokens on one GPU, where nothing is rounded to blocks."""
    return math.ceil(kv_bytes(shape, tp, c) * shape.mean_context(length)) + state_bytes(shape, tp, c)


def block_bytes(shape: ModelShape, tp: int, c: int) -> int:
    """Return the bytes of a block: of as many layers as a group has."""
    return _block_tokens(shape, tp, c, BLOCK) * _groups(shape).size * kv_bytes(shape, tp, c) // shape.n_layers


def cache_use(shape: ModelShape, tp: int, c: int, length: int, step_tokens: int, block: int = BLOCK) -> CacheUse:
    """Return what sequences of ``length`` tokens take, in blocks of ``block`` tokens, where a step has ``step_tokens``.

    A window may begin within a block (vllm.v1.kv_cache_interface, SlidingWindowSpec.max_admission_blocks_per_request).
    """
    groups, block = _groups(shape), _block_tokens(shape, tp, c, block)
    a_block, whole = block * groups.size * kv_bytes(shape, tp, c) // shape.n_layers, -(-length // block)
    first, further = (
        a_block
        * (
            groups.full * whole
            + groups.windowed * min(whole, -(-(shape.windows.tokens - 1 + tokens) // block) + 1)
            + groups.states
        )
        for tokens in (STEPS_AT_ONCE * step_tokens, 1)
    )
    return CacheUse(first, further)


def _block_tokens(shape: ModelShape, tp: int, c: int, block: int) -> int:
    """Return the tokens of a block, of ``block`` or as many more as a state takes.

    See vllm.platforms.interface, _align_hybrid_block_size.
    """
    if not shape.states.n_layers:
        return block
    state, step = shape.states.layer_bytes(c) / tp, LATENT_BLOCK if shape.latent else BLOCK
    return step * max(1, math.ceil(state * shape.n_layers / (step * kv_bytes(shape, tp, c))))


class _Groups(NamedTuple):
    """Counts the layers of a group, and the groups of layers of each kind."""

    size: int
    full: int
    windowed: int
    states: int


def _groups(shape: ModelShape) -> _Groups:
    """Return the groups that vLLM makes.

    A group has as many layers as there are of the rarest kind, or of the most frequent one where those are less than
    half as many more.
    """
    counts = (shape.n_attending, shape.windows.n_layers, shape.states.n_layers)
    least, most = min(filter(None, counts)), max(counts)
    size = most if most < 1.5 * least else least
    return _Groups(size, *(-(-count // size) for count in counts))

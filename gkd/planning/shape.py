"""The shape of a language model: every weight it has, and what a token costs on its way through.

Exact for the families of :mod:`gkd.planning.families`; a model of another type is taken for a decoder like Llama, and
``note`` says so.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

Norm = Literal["rms", "gemma", "layer"]
Mlp = Literal["gated", "gelu_new", "gelu"]


@dataclass(frozen=True, slots=True)
class Weight:
    """A tensor of ``rows`` (its first axis, which FSDP2 shards) times ``cols`` numbers.

    ``linear``: whether it is the matrix of a linear layer, which an adapter can be put beside. ``share``: the part of
    it that one token passes through, below 1 for experts.
    """

    name: str
    rows: int
    cols: int = 1
    linear: bool = False
    share: float = 1.0

    @property
    def size(self) -> int:
        """Numbers in it."""
        return self.rows * self.cols

    def shard(self, world: int) -> int:
        """Numbers of it on the rank that has most, of ``world`` ranks: whole rows."""
        return -(-self.rows // world) * self.cols


@dataclass(frozen=True, slots=True)
class Experts:
    """A mixture of experts: how many, how many a token goes to, and how wide each is."""

    count: int
    per_token: int
    width: int


@dataclass(frozen=True, slots=True)
class Layers:
    """``count`` decoder layers that are alike. ``experts`` is None where the feed-forward part is dense."""

    count: int
    weights: tuple[Weight, ...]
    width: int
    experts: Experts | None = None

    @property
    def size(self) -> int:
        """Numbers in one of them."""
        return sum(w.size for w in self.weights)


@dataclass(frozen=True)
class ModelShape:
    """A decoder: its weights, and the widths that activations and the key-value cache follow from.

    ``root`` holds what is in no layer: embeddings, final norm and, unless tied, the head. ``norms`` is the number of
    norms in a layer, ``qk_norm`` whether queries and keys have one too, ``positions`` the longest sequence (None: no
    limit). ``note`` says what was assumed about it.
    """

    kind: str
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    vocabulary: int
    tied: bool
    layers: tuple[Layers, ...]
    root: tuple[Weight, ...]
    norm: Norm = "rms"
    norms: int = 2
    qk_norm: bool = False
    mlp: Mlp = "gated"
    positions: int | None = None
    note: str = ""

    @cached_property
    def n_layers(self) -> int:
        """Decoder layers."""
        return sum(kind.count for kind in self.layers)

    @cached_property
    def n_root(self) -> int:
        """Parameters in no layer."""
        return sum(w.size for w in self.root)

    @cached_property
    def n_parameters(self) -> int:
        """All parameters; tied ones once."""
        return self.n_root + sum(kind.count * kind.size for kind in self.layers)

    @cached_property
    def largest_layer(self) -> int:
        """Parameters of the largest layer."""
        return max(kind.size for kind in self.layers)

    @cached_property
    def largest_weight(self) -> int:
        """Numbers of the largest tensor."""
        return max(w.size for w in self.weights())

    @cached_property
    def n_active(self) -> float:
        """Parameters of the layers' matrices that one token is multiplied with. The head is not among them."""
        return sum(kind.count * w.size * w.share for kind in self.layers for w in kind.weights if w.cols > 1)

    @property
    def head(self) -> int:
        """Parameters of the head, tied or not."""
        return self.hidden * self.vocabulary

    @property
    def kv_numbers_per_token(self) -> int:
        """Numbers one token has in the key-value cache of all layers."""
        return 2 * self.n_layers * self.kv_heads * self.head_dim

    def weights(self) -> Iterable[Weight]:
        """Every distinct weight: of one layer of each kind, and the root's."""
        for kind in self.layers:
            yield from kind.weights
        yield from self.root

    def sharded(self, world: int) -> int:
        """Parameters on the rank that has most of them, of ``world``."""
        layers = sum(kind.count * sum(w.shard(world) for w in kind.weights) for kind in self.layers)
        return layers + sum(w.shard(world) for w in self.root)

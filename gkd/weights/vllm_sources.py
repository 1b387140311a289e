"""The actor's end of vLLM's own transfers: where they get weights from, and how their calls reach the engines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import Tensor
from vllm.distributed.weight_transfer.base import ParamMeta, WeightSource, layerwise_groups
from vllm.distributed.weight_transfer.m2n_common import REPLICATE, REPLICATED, M2NMesh, M2NParamMeta
from vllm.distributed.weight_transfer.m2n_source import M2NWeightSource

from gkd.errors import RunFailed
from gkd.weights.delivery import Delivery
from gkd.weights.shards import ShardCall, ShardSource
from gkd.weights.transfer import Bucket


class Shards(M2NWeightSource):  # type: ignore[misc]
    """Yields what this of ``n_ranks`` ranks has of each tensor."""

    def __init__(self, source: ShardSource, n_ranks: int) -> None:
        self._source, self._n_ranks = source, n_ranks

    def mesh(self) -> M2NMesh:
        """Return the one dimension of all ranks, as vLLM writes it."""
        return M2NMesh((self._n_ranks, 1), 0)

    def metadata(self) -> list[ParamMeta]:
        """Return each tensor's name, type, whole shape, and along what it is in parts."""
        return [
            M2NParamMeta(part.name, part.dtype, part.shape, REPLICATED if part.dim is None else (part.dim, REPLICATE))
            for part in self._source.layout()
        ]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._source.parts()


class GatheredTensors(WeightSource):  # type: ignore[misc]
    """Yields each tensor gathered, layer by layer as vLLM divides names into layers. A collective.

    A model that has layers of several kinds, as for text and for images, has some names between those otherwise.
    """

    def __init__(self, source: ShardSource) -> None:
        self._source = source
        layout = {part.name: part for part in source.layout()}
        self._parts = [layout[name] for group in layerwise_groups(list(layout)) for name in group]

    def metadata(self) -> list[ParamMeta]:
        """Return each tensor's name, type and shape."""
        return [ParamMeta(part.name, part.dtype, part.shape) for part in self._parts]

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return self._source.gather([part.name for part in self._parts])


class DeliveryClient:
    """vLLM's ``VLLMWeightSyncClient``, whose calls are buckets of ``delivery``, that of the push under way.

    Every call returns when all ``engines``, of these ranks, have done it, and raises RunFailed where one did not.
    """

    def __init__(self, delivery: Delivery, engines: tuple[int, ...]) -> None:
        self._engines = engines
        self.begin(delivery)

    def begin(self, delivery: Delivery) -> None:
        """Begin another push."""
        self._delivery, self._number = delivery, 0

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        """Have the engines meet the actor."""
        self._call("init", init_info)

    def start_weight_update(self) -> None:
        """Have them begin a reload."""
        self._call("start")

    def update_weights(self, update_info: Any) -> None:
        """Have them receive, while the actor sends."""
        self._call("update", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        """Have them serve what they received; the version is that of the push."""
        self._call("finish")

    def _call(self, verb: Any, info: dict[str, Any] | None = None) -> None:
        call = ShardCall(verb, info or {}, self._engines)
        bucket = Bucket(self._delivery.push.version, self._number, verb == "finish", (call,))
        self._number += 1
        self._delivery.send(bucket)
        self._delivery.make_room(0)
        for engine, error in self._delivery.lost.items():
            raise RunFailed(f"{bucket}: engine {engine} did not {verb} the transfer: {error}")

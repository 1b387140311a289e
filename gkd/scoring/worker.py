"""One model that scores, of the teacher's, the reference's or the reward model's group, and its server."""

from __future__ import annotations

import threading
from dataclasses import dataclass, replace
from typing import Any

from gkd.cluster.workers.activity import report_here
from gkd.cluster.workers.failure import WorkerHung
from gkd.config import RewardModel, Scorer
from gkd.config.device import Device, Dtype, NodeSpan
from gkd.config.groups import model_setting
from gkd.data.model_info import ModelInfo, fingerprint_weights
from gkd.data.tokenizer import load_tokenizer
from gkd.errors import RunFailed
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.scoring.address import Key
from gkd.scoring.server import ScoringServer


@dataclass(frozen=True, slots=True)
class ScorerSpec:
    """The model that scores, how it runs, and where its server listens: ``port`` 0 is a free one.

    ``name``: which of the models that score, as in :class:`gkd.inference.engine.EngineSpec`.
    ``sleeps``: it is to give its memory back. ``cache_bytes`` as there.
    """

    name: str
    dtype: Dtype
    model_path: str
    device: Device
    tokenizer_hash: str
    bind_ip: str
    key: Key
    sleeps: bool = False
    eos_ids: tuple[int, ...] = ()
    port: int = 0
    cache_bytes: int | None = None


class ScoringWorker:
    """Built inside a Ray worker: has an engine, and a ``server`` of its own on a port of ``bind_ip``.

    The engine belongs to the thread that builds this object and calls :meth:`serve`; other methods may be called from
    others. The driver calls methods of ``server`` by their names there, such as ``server.sleep``. Raises ConfigError
    when there is no usable model, RunFailed when the engine does not start.
    """

    def __init__(self, settings: Scorer | RewardModel, spec: ScorerSpec, span: NodeSpan | None = None) -> None:
        # Torch and vLLM are imported now: the process has checked its device by the time it builds a worker.
        self._engine: InferenceEngine[Any, Any] = settings.engine_class(_engine_spec(settings, spec, span))
        self._cache_bytes: int | None = self._engine.cache_bytes()
        weights = fingerprint_weights(spec.model_path)
        self.server = ScoringServer(
            self._engine, spec.tokenizer_hash, spec.bind_ip, spec.port, spec.key, weights=weights
        )

    def address(self) -> str:
        """Return ``tcp://host:port`` for clients."""
        return self.server.address

    def cache_bytes(self) -> int | None:
        """Return the size that the engine measured for its cache when it started, see :class:`InferenceEngine`."""
        return self._cache_bytes

    def progress(self) -> tuple[int, int]:
        """Return steps of the engine so far, and requests that it works on."""
        return self.server.progress()

    def report(self) -> dict[str, Any]:
        """Return memory and activity of this process, see :func:`gkd.cluster.workers.activity.report_here`."""
        return report_here()

    def serve(self) -> None:
        """Answer requests for as long as this process lives. Raises RunFailed when the engine fails.

        That is WorkerHung where a process of the engine's has died: then a new one may do better.
        """
        try:
            self.server.serve(threading.Event())
        except RunFailed as failure:
            if self._engine.has_lost_process():
                raise WorkerHung(f"a process of an engine has died: {failure}") from failure
            raise
        finally:
            self._engine.close()


def scoring_follower(settings: Scorer, spec: ScorerSpec, span: NodeSpan) -> Any:
    """Return the part on a further node of the engine that a ScoringWorker with these arguments leads."""
    return settings.engine_class.follow(_engine_spec(settings, spec, span))


def _engine_spec(settings: Scorer | RewardModel, spec: ScorerSpec, span: NodeSpan | None) -> EngineSpec:
    path, setting = spec.model_path, model_setting(spec.name)
    model = ModelInfo.read(path, setting, None if settings.rates else load_tokenizer(path, setting))
    model = replace(model, eos_ids=sorted({*model.eos_ids, *spec.eos_ids}))
    return EngineSpec(
        spec.name,
        path,
        model,
        settings,
        spec.device,
        spec.dtype,
        sleeps=spec.sleeps,
        span=span,
        cache_bytes=spec.cache_bytes,
    )

"""One teacher of the group: an engine and its server, in a process of their own."""

from __future__ import annotations

import threading

from gkd.config import Config
from gkd.teacher.address import Key
from gkd.vllm_engine import installed_device


class TeacherWorker:
    """Built inside a Ray worker: loads the teacher in ``model_path`` and binds a free port of ``bind_ip``.

    The engine belongs to the thread that builds this object and calls :meth:`serve`; :meth:`address` and :meth:`stop`
    may be called from others. Raises ConfigError when there is no usable model, or when ``bind_ip`` is not loopback
    and there is no ``key``; RunFailed when the engine does not start.
    """

    def __init__(
        self, config: Config, model_path: str, tokenizer_hash: str, rank: int, bind_ip: str, key: Key | None
    ) -> None:
        # Torch and vLLM are imported now: the process has checked its device by the time it builds a worker.
        from gkd.teacher.scoring import VllmEngine
        from gkd.teacher.server import TeacherServer

        self.rank = rank
        self._stop = threading.Event()
        self._engine = VllmEngine(model_path, config.teacher, installed_device(), dtype=config.model.dtype)
        self._server = TeacherServer(self._engine, tokenizer_hash, bind_ip, 0, key)

    def address(self) -> str:
        """``tcp://host:port`` for clients."""
        return self._server.address

    def serve(self) -> None:
        """Answer requests until :meth:`stop`. Raises RunFailed when the engine fails."""
        try:
            self._server.serve(self._stop)
        finally:
            self._engine.close()

    def stop(self) -> None:
        """End :meth:`serve` within a second and a forward pass."""
        self._stop.set()

"""One engine that scores, of the teacher's group or the reference's, and its server, in a process of their own."""

from __future__ import annotations

import threading
from typing import Literal

from gkd.config import Scorer
from gkd.data.checkpoint import Checkpoint
from gkd.data.tokenizer import load_tokenizer
from gkd.observability.memory import gpu_memory
from gkd.teacher.address import Key
from gkd.vllm_engine import Device


class TeacherWorker:
    """Built inside a Ray worker: loads the model in ``model_path`` and binds a free port of ``bind_ip``.

    The engine belongs to the thread that builds this object and calls :meth:`serve`; other methods may be called from
    others. Raises ConfigError when there is no usable model, or when ``bind_ip`` is not loopback
    and there is no ``key``; RunFailed when the engine does not start.
    """

    def __init__(
        self,
        settings: Scorer,
        dtype: Literal["float32", "bfloat16"],
        model_path: str,
        tokenizer_hash: str,
        device: Device,
        bind_ip: str,
        key: Key | None,
    ) -> None:
        # Torch and vLLM are imported now: the process has checked its device by the time it builds a worker.
        from gkd.teacher.scoring import VllmEngine
        from gkd.teacher.server import TeacherServer

        self._engine = VllmEngine(
            model_path,
            Checkpoint.read(model_path, "teacher.model.path", load_tokenizer(model_path, "teacher.model.path")),
            settings,
            device,
            dtype=dtype,
        )
        self._server = TeacherServer(self._engine, tokenizer_hash, bind_ip, 0, key)

    def address(self) -> str:
        """``tcp://host:port`` for clients."""
        return self._server.address

    def memory(self) -> dict[str, float]:
        """GPU memory of this engine in GB."""
        return gpu_memory()

    def serve(self) -> None:
        """Answer requests for as long as this process lives. Raises RunFailed when the engine fails."""
        try:
            self._server.serve(threading.Event())
        finally:
            self._engine.close()

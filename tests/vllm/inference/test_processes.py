"""An engine whose model runner is a process of its own, as on a GPU."""

from __future__ import annotations

import logging
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
from vllm.engine.arg_utils import EngineArgs
from vllm.v1.executor import multiproc_executor
from vllm.v1.executor.multiproc_executor import MultiprocExecutor

from gkd.cluster.workers.environment import environment
from gkd.config import load
from gkd.data.model_info import ModelInfo
from gkd.errors import RemoteError, describe_error
from gkd.inference import vllm_sampler
from gkd.inference.engine import EngineSpec
from gkd.inference.vllm_lifecycle import Follower, start_llm
from gkd.weights import vllm_plugin
from tests.vllm.conftest import VLLM_LENGTH, VLLM_VOCABULARY

LIMIT_S = 300.0


def main(whole: str, broken: str) -> None:
    """Start an engine from a directory that is not whole, and one from one that is; then wait to be killed."""
    os.environ.update(environment("cpu", []))
    info, config = (
        ModelInfo(VLLM_VOCABULARY, VLLM_LENGTH, [2], VLLM_VOCABULARY),
        load({"weights": {"transfer": "auto"}}),
    )
    for path in (broken, whole):
        spec = EngineSpec.for_rollout(config, path, info, 64, 0, "cpu")
        try:
            llm = start_llm({**vllm_sampler._arguments(spec), "distributed_executor_backend": "mp"}, "cpu")
        except RemoteError as error:
            print(f"failure: {describe_error(error)}", flush=True)
        else:
            engine: Any = object.__new__(vllm_sampler.VLLMSampler)
            engine.llm_engine = llm.llm_engine
            print(f"process: {engine.call_processes(os.getpid)[0]}", flush=True)
            signal.pause()


def follow() -> object:
    return Follower({"model": "any"})


def test_a_process_of_an_engine_says_why_it_does_not_start_and_ends_with_its_worker(
    tiny_llama: Path, tmp_path: Path
) -> None:
    """Also one that does not come to ending by itself, as it waits for its GPU."""
    for file in tiny_llama.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-5000])
    command = [sys.executable, "-m", "tests.vllm.inference.test_processes", str(tiny_llama), str(tmp_path)]
    lines: dict[str, str] = {}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True) as worker:
        deadline = threading.Timer(LIMIT_S, worker.kill)
        deadline.start()
        try:
            assert worker.stdout is not None
            for line in worker.stdout:
                name, _, text = line.partition(": ")
                lines[name] = text.strip()
                if name == "process":
                    break
            runner = psutil.Process(int(lines["process"]))
            runner.suspend()
        finally:
            deadline.cancel()
            worker.kill()
    assert lines["failure"].startswith("SafetensorError: ")
    try:
        runner.wait(10)
    except psutil.TimeoutExpired:
        if runner.status() != psutil.STATUS_ZOMBIE:  # nobody here waits for it
            runner.kill()
            pytest.fail("the model runner outlived its worker")


def test_an_error_that_vllm_logs_and_goes_on_from_is_not_why_a_process_did_not_start(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As each of several GPUs without NVLink does before it starts, which is normal as vLLM says itself."""
    for name in ("vllm", "vllm.v1.executor"):
        monkeypatch.setattr(logging.getLogger(name), "handlers", [])
    with vllm_plugin.note_errors(None) as first_error:
        vllm_plugin.register()
        for text, module in (("Not Supported", "vllm.platforms.cuda"), ("no memory", multiproc_executor.__name__)):
            try:
                raise ValueError(text)
            except ValueError:
                logging.getLogger(module).exception("failed")
        assert first_error() == "ValueError: no memory"


@pytest.mark.parametrize(
    ("part", "start"),
    [("vllm.LLM", lambda: start_llm({}, "cpu")), (f"{MultiprocExecutor.__module__}.MultiprocExecutor", follow)],
)
def test_a_process_that_was_killed_as_it_started_is_named(
    part: str, start: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also one of an engine's on a further node."""

    def fail(*arguments: object, **settings: object) -> None:
        raise Exception("WorkerProc initialization failed. See stack trace for root cause.")

    monkeypatch.setattr(EngineArgs, "create_engine_config", lambda *arguments, **settings: None)
    monkeypatch.setattr(part, fail)
    with pytest.raises(RuntimeError, match=r"killed"):
        start()


if __name__ == "__main__":
    main(*sys.argv[1:])

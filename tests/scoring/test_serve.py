"""``python -m gkd.teacher.serve``, and the worker of the group."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from gkd.cli.serve_teacher import compose_server
from gkd.config import Teacher
from gkd.errors import RunFailed
from gkd.scoring.address import Key
from gkd.scoring.client import Score, ScorerUnavailable, ScoringClient
from tests.scoring.conftest import ROOT, VLLM_LENGTH


def serve(*arguments: str, **settings: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gkd.teacher.serve", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def model(tiny_llama: Path) -> Path:
    """The tiny Llama with a tokenizer."""
    from tokenizers import Tokenizer, models
    from transformers import PreTrainedTokenizerFast

    words = {f"w{i}": i for i in range(95)} | {"</s>": 95}
    tokenizer = Tokenizer(models.WordLevel(words, unk_token="w0"))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="</s>").save_pretrained(tiny_llama)
    return tiny_llama


def test_ctrl_c_while_the_model_loads(model: Path) -> None:
    process = serve(f"teacher.model.path={model}", f"teacher.server_port={free_port()}")
    assert process.stderr is not None
    assert process.stderr.readline() == f"loading the teacher in {model} ...\n"
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=10)
    assert process.returncode == 130 and out == "" and "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["teacher.model.path=/nowhere"], "teacher.model.path=/nowhere: no such directory"),
        (["teacher.server_port=1"], "teacher.model.path is missing"),
        (["teacher.modle.path=x"], "unknown setting teacher.modle.path (did you mean teacher.model.path?)"),
        (["teacher.model.path=x", "teacher.server_ip=0.0.0.0"], "0.0.0.0 is not loopback and has no key"),
        (["teacher.model.path=x", "teacher.n_gpus_per_node=2"], "2 are asked for: start one server for each"),
        (["teacher.model.path=x", "teacher.server_port=IN_USE"], "cannot listen on tcp://127.0.0.1:IN_USE: Address"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments: list[str], message: str) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen(1)
        port = str(taken.getsockname()[1])
        out, err = (process := serve(*(a.replace("IN_USE", port) for a in arguments))).communicate(timeout=60)
    assert process.returncode == 2 and out == ""
    assert err.startswith("error: ") and message.replace("IN_USE", port) in err and err.count("\n") == 1


def test_where_a_file_says_a_server_listens(tmp_path: Path) -> None:
    (tmp_path / "a.yaml").write_text("teacher: {model: {path: x}, server_ip: 10.0.0.1}\n")
    (tmp_path / "b.yaml").write_text("teacher: {model: {path: x}, server_ip: null}\n")
    assert compose_server([str(tmp_path / "a.yaml")]).teacher.server_ip == "10.0.0.1"
    assert compose_server([str(tmp_path / "a.yaml"), "teacher.server_ip=10.0.0.2"]).teacher.server_ip == "10.0.0.2"
    assert compose_server([str(tmp_path / "b.yaml")]).teacher.server_ip == "127.0.0.1"
    assert compose_server(["teacher.model.path=x"]).teacher.server_ip == "127.0.0.1"


@pytest.mark.vllm
def test_a_worker_serves_until_its_engine_fails(model: Path, vllm_engine: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the Ray host uses it: built, and served on one thread. The engine is the session's."""
    from gkd.inference import vllm_scorer as scoring
    from gkd.inference.engine import EngineSpec
    from gkd.scoring.worker import ScorerSpec, TokenScorerWorker

    closed: list[bool] = []

    class Lent:
        can_score = True

        def __init__(self, spec: EngineSpec) -> None:
            assert (spec.dtype, spec.sleeps, spec.span) == ("float32", False, None)
            assert (spec.model_path, spec.device) == (str(model), "cpu")
            assert (spec.model.vocabulary, spec.model.n_tokens, spec.model.eos_ids) == (96, 96, [2, 7, 95])
            self.limits, self.busy, self.step = vllm_engine.limits, vllm_engine.busy, vllm_engine.step
            self.broken = False

        def add(self, key: int, request: Score) -> None:
            if self.broken:
                raise MemoryError("no room")
            vllm_engine.add(key, request)

        def close(self) -> None:
            closed.append(True)

    monkeypatch.setattr(scoring, "VLLMScorer", Lent)
    settings = Teacher(max_model_len=VLLM_LENGTH)
    key = Key.generate()
    spec = ScorerSpec("float32", str(model), "cpu", "hash", "127.0.0.1", key, eos_ids=(7,))
    worker = TokenScorerWorker(settings, spec)
    failures: list[RunFailed] = []

    def serve_until_it_fails() -> None:
        with pytest.raises(RunFailed) as caught:
            worker.serve()
        failures.append(caught.value)

    thread = threading.Thread(target=serve_until_it_fails)
    thread.start()
    client = ScoringClient([worker.address()], "hash", 3, key=key, max_attempts=1)
    client.connect(10)
    assert client.submit(Score(np.array([5, 7, 8], np.int32), ((1, 3),), 3)).result(20).ids.shape == (2, 3)
    worker._engine.broken = True
    with pytest.raises(ScorerUnavailable):
        client.submit(Score(np.array([5, 7, 8], np.int32), ((1, 3),), 3)).result(20)
    client.close()
    thread.join(5)
    assert not thread.is_alive() and closed == [True]
    assert "MemoryError: no room" in str(failures[0])

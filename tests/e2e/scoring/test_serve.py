"""``python -m gkd.teacher.serve``."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from gkd.cli.serve_teacher import compose_server
from tests.e2e.on_a_cluster.conftest import free_port
from tests.error_text import contains_in_order
from tests.scoring.conftest import ROOT


def serve(*arguments: str, **settings: Any) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "gkd.teacher.serve", *arguments]
    return subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, **settings)


def test_ctrl_c_while_the_model_loads(model: Path) -> None:
    slow = "teacher.engine=vllm"  # the other one has loaded this model within a second
    process = serve(f"teacher.model.path={model}", f"teacher.server_port={free_port()}", slow)
    assert process.stderr is not None
    assert contains_in_order(process.stderr.readline(), "teacher", model)
    time.sleep(1.0)
    os.kill(process.pid, signal.SIGINT)
    out, err = process.communicate(timeout=120)
    assert (process.returncode, out) == (130, ""), err
    assert "Traceback" not in err


HIDE_A_SIGNAL = """
import os, signal, time
from gkd.inference.torch_scorer import TorchScorer

class Finalized:
    def __del__(self):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

class Swallows(TorchScorer):
    def __init__(self, spec):
        Finalized()
        super().__init__(spec)

class Passes(TorchScorer):
    def __init__(self, spec):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(30)

class Converts(TorchScorer):
    def __init__(self, spec):
        try:
            os.kill(os.getpid(), signal.SIGINT)
            time.sleep(30)
        except BaseException as error:
            raise ImportError("initialization failed") from error
"""


@pytest.mark.parametrize("engine", ["Swallows", "Passes", "Converts"])
def test_ctrl_c_that_finds_another_s_code_while_the_model_loads(engine: str, model: Path, tmp_path: Path) -> None:
    (tmp_path / "engine.py").write_text(HIDE_A_SIGNAL)
    settings = [f"teacher.model.path={model}", f"teacher.server_port={free_port()}"]
    process = serve(*settings, f"teacher.engine={tmp_path}/engine.py:{engine}")
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (130, ""), err
    assert "Traceback" not in err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["teacher.model.path=/nowhere"], "teacher.model.path=/nowhere: no such directory"),
        (["teacher.server_port=1"], "teacher.model.path is missing"),
        (["teacher.modle.path=x"], "unknown setting teacher.modle.path (did you mean teacher.model.path?)"),
        (["teacher.model.path=x", "teacher.server_ip=0.0.0.0"], "0.0.0.0 is not loopback and has no key"),
        (["teacher.model.path=x", "teacher.n_gpus_per_node=2"], "2 are requested: start one server for each"),
        (["teacher.model.path=x", "teacher.server_port=IN_USE"], "cannot listen on tcp://127.0.0.1:IN_USE: Address"),
    ],
)
def test_bad_input_is_told_in_one_line(arguments: list[str], message: str) -> None:
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        listener.listen(1)
        port = str(listener.getsockname()[1])
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

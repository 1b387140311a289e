"""vLLM loads packed pieces: the real engine on a CPU, where the bytes are handed over instead of fetched by CUDA."""

from __future__ import annotations

import base64
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from gkd.data.model_info import ModelInfo
from gkd.errors import RunFailed
from gkd.inference.engine import GpuReceiver
from gkd.inference.vllm_engine import environment
from gkd.types import Sampling
from gkd.weights import ipc, nccl
from gkd.weights.pieces import Packer, Piece
from tests.vllm.inference.test_engines import EOS, N_TOKENS, SHAPE, make, requests, run, small_engine, worst_difference


class Handed(Packer):
    """Packs on the CPU; the "handle" is the buffer itself."""

    def shown(self, piece: Piece) -> Piece:
        return replace(super().shown(piece), handles={"cpu": (self.packed,)})


@pytest.fixture(autouse=True)
def _by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    def receive(piece: Piece, device: torch.device) -> Tensor:
        found = ipc.handle_for(piece, "cpu")[0]
        assert isinstance(found, Tensor)
        return found.clone()

    monkeypatch.setattr(ipc, "receive", receive)


@pytest.fixture(scope="module")
def engine(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GpuReceiver]:
    """An engine with the backend of a way; its embeddings are tied to its head."""
    os.environ.update(environment("cpu"))
    from vllm import LLM

    from gkd.inference.vllm import VLLMEngine
    from gkd.weights import vllm_plugin

    path: Path = tmp_path_factory.mktemp("model")
    make(True, seed=0).save_pretrained(path)
    llm = LLM(**small_engine(str(path)), weight_transfer_config={"backend": vllm_plugin.register(request.param)})
    yield VLLMEngine(llm, ModelInfo(SHAPE["vocab_size"], SHAPE["max_position_embeddings"], [EOS], N_TOKENS))
    del llm


def pieces(model: nn.Module, version: int) -> Iterator[Piece]:
    packer = Handed(torch.device("cpu"), 20_000, checksum=True)
    state = {name: t for name, t in model.state_dict().items() if name != "lm_head.weight"}  # tied
    packer.open(state.items(), version, packs=True)
    while (piece := packer.next()) is not None:
        yield piece


@pytest.mark.parametrize("engine", ["ipc"], indirect=True)
def test_the_engine_becomes_the_pushed_model_piece_by_piece(engine: GpuReceiver) -> None:
    assert isinstance(engine, GpuReceiver)
    wanted = requests(Sampling(12))
    run(engine, wanted)  # fills the prefix cache with the old weights
    for version, seed in ((1, 7), (2, 8)):
        pushed, count = make(True, seed), 0
        for piece in pieces(pushed, version):
            engine.take(piece)
            count += 1
        engine.finish(version)
        assert count > 3
        assert engine.llm.get_weight_version() == str(version)
        found = run(engine, wanted)
        assert worst_difference(pushed, wanted, found) < 2e-4
        assert worst_difference(make(True, 0), wanted, found) > 0.1


@pytest.mark.parametrize("engine", ["ipc"], indirect=True)
def test_a_damaged_piece_is_not_loaded(engine: GpuReceiver) -> None:
    piece = next(pieces(make(True, 9), 3))
    piece.handles["cpu"][0][5] ^= 1
    with pytest.raises(RunFailed, match=r"weights version 3, piece 1 differs from what was sent"):
        engine.take(piece)


@pytest.mark.parametrize("engine", ["nccl"], indirect=True)
def test_by_nccl_an_engine_needs_the_group_and_asks_vllm_for_it(engine: GpuReceiver) -> None:
    """As far as a CPU goes: vLLM takes the id, and fails where it would load NCCL."""
    with pytest.raises(RunFailed, match=r"weights version 3, piece 1: this engine is in no NCCL group"):
        engine.take(next(pieces(make(True, 9), 3)))
    with pytest.raises(ValueError, match=r"128 bytes, got 3"):
        engine.join(base64.b64encode(b"abc").decode(), 1, 2)
    if torch.version.cuda is None:
        with pytest.raises(RuntimeError, match=r"NCCL library|accelerator"):
            engine.join(base64.b64encode(bytes(128)).decode(), 1, 2)


def test_a_communicator_that_would_do_nothing_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.distributed.weight_transfer.nccl_common import uid_init_process_group

    monkeypatch.setattr("vllm.envs.VLLM_DISABLE_PYNCCL", True, raising=False)
    with pytest.raises(RunFailed, match=r"communicator is disabled \(VLLM_DISABLE_PYNCCL\)"):
        nccl.enabled(uid_init_process_group(bytes(128), 1, 2, 0))

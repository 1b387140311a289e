"""A run with an engine and a transfer of the user's own, each a file outside of the project."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file

ENGINE = """
import numpy as np
from pydantic import BaseModel, Field

from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.types import Sample, SampleRequest


class RandomTokens(InferenceEngine[SampleRequest, Sample]):
    can_sample = True

    class Config(BaseModel):
        n_tokens: int = Field(4, ge=1, description="tokens to draw from")

    def __init__(self, spec: EngineSpec) -> None:
        self.n, self.end, self.waiting = spec.settings.own().n_tokens, spec.model.eos_ids[0], []

    def add(self, key, request):
        self.waiting.append((key, request))

    def busy(self):
        return bool(self.waiting)

    def step(self):
        self.forward_passes += 1
        done, self.waiting = self.waiting, []
        return [(key, self.sample(request)) for key, request in done]

    def sample(self, request):
        rng = np.random.default_rng(request.seed)
        tokens = np.append(rng.integers(0, self.n, rng.integers(1, request.sampling.max_tokens)), self.end)
        logprobs = np.full(len(tokens), -np.log(self.n), np.float32)
        return Sample.single_turn(request, tokens.astype(np.int32), logprobs, self.version, "stop")

    def load_weights(self, piece, tensors):
        pass  # a transfer brought them; random tokens need none
"""

TRANSFER = """
from pathlib import Path

from pydantic import BaseModel, Field
from safetensors.torch import load_file, save_file

from gkd.weights.transfer import Receiver, Sender, Transfer


class Writer(Sender):
    def pack(self, tensors, piece):
        file = Path(self.settings.own().directory, f"{piece.version}-{piece.number}.safetensors")
        save_file(tensors, file)
        return str(file)


class Reader(Receiver):
    def receive(self, piece):
        tensors = load_file(piece.contents[0])
        Path(f"{piece.contents[0]}.read").touch()
        return tensors


class Files(Transfer):
    sender, receiver = Writer, Reader

    class Config(BaseModel):
        directory: str = Field(description="where all machines see the files")
"""


def test_a_run_samples_with_an_own_engine_and_sends_weights_through_files(start: Any, tmp_path: Path) -> None:
    parts, files = tmp_path / "parts", tmp_path / "files"
    parts.mkdir()
    files.mkdir()
    for name, text in (("engine", ENGINE), ("transfer", TRANSFER)):
        assert len(text.splitlines()) <= 40
        (parts / f"{name}.py").write_text(text)
    run = start(
        f"rollout.engine={parts}/engine.py:RandomTokens", "rollout.n_tokens=3",
        f"weights.transfer={parts}/transfer.py:Files", f"weights.directory={files}",
        "reward.functions=[length]", "trainer.total_steps=2", "trainer.val_every=2", "data.val_limit=8",
        recipe="grpo",
    )  # fmt: skip
    assert run.end(240) == 0, run.text()
    sampled = [json.loads(line) for line in (run.output / "samples.jsonl").read_text().splitlines()]
    assert [sample["logprob_mean"] for sample in sampled] == pytest.approx([-math.log(3)] * len(sampled))
    written = {f"{version}-0.safetensors" for version in (1, 2)}
    assert {file.name for file in files.iterdir()} == written | {f"{name}.read" for name in written}
    pushed, model = load_file(files / "2-0.safetensors"), load_file(run.output / "model" / "model.safetensors")
    assert pushed.keys() == model.keys()
    assert all((pushed[name] == model[name]).all() for name in model)
    before = load_file(files / "1-0.safetensors")
    assert any((before[name] != pushed[name]).any() for name in pushed)  # something was learned in between

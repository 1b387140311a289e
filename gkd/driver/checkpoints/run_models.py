"""The models that a run has left: where it began, every checkpoint, and the trained student."""

from __future__ import annotations

import hashlib
import json
import logging
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gkd.config import Config, Lora
from gkd.data.model_info import fingerprint_weights
from gkd.data.tokenizer import check_causal_lm
from gkd.driver.checkpoints.checkpoint import SavedCheckpoint, is_complete, iterate_intact
from gkd.driver.inputs.find import find_files
from gkd.durable import move_files
from gkd.errors import ConfigError, RunFailed
from gkd.evaluation.answers import fingerprint
from gkd.evaluation.plan import START
from gkd.evaluation.questions import PROMPT_SETTINGS
from gkd.evaluation.reloading import FurtherWeights, WeightsDeleted
from gkd.observability.report import steps_done

if TYPE_CHECKING:
    from torch import Tensor

    from gkd.actor.model import Student

log = logging.getLogger("gkd")


@dataclass(frozen=True)
class RunModels:
    """``base``: directory of the model that the run began with; ``further``: what became of it, by step."""

    base: str
    further: tuple[FurtherWeights, ...]


def models_of_run(run: Path, config: Config) -> RunModels:
    """Find the models of the run with ``config`` in the directory ``run``; damaged checkpoints are warned of.

    Raises ConfigError where nothing was trained yet, or the model that was trained is not what and where it was.
    """
    damaged: dict[Path, str] = {}
    intact = list(iterate_intact(run / "checkpoints", damaged))
    checkpoints = {saved.state.step: saved for saved in reversed(intact)}
    for path, why in damaged.items():
        log.warning("%s is damaged and left out: %s", path, why)
    base = next((saved.model for saved in intact), "")
    setting = "the model that was trained" if base or config.uses_task else "model.path"
    base = check_causal_lm(base or find_files(config, log.info).student, setting)
    _require_base(intact, base)
    model_fingerprint = fingerprint(base)
    further = [
        FurtherWeights(f"step_{step}", _sum(model_fingerprint, saved), partial(_read, saved, base))
        for step, saved in checkpoints.items()
    ]
    if (steps := steps_done(run)) is not None and steps not in checkpoints:
        model = check_causal_lm(str(run / "model"), "the student of the run")
        further.append(FurtherWeights(f"step_{steps}", fingerprint(model), partial(_read_model, model)))
    if not further:
        raise ConfigError(f"{run} holds neither a whole checkpoint nor a trained student (trainer.save_every)")
    return RunModels(base, tuple(further))


def _sum(model: str, saved: SavedCheckpoint) -> str:
    """Return the fingerprint of a checkpoint of what began as the model with that fingerprint."""
    files = {name: asdict(sum_) for name, sum_ in saved.files.items()}
    return hashlib.sha256(json.dumps([model, files], sort_keys=True).encode()).hexdigest()[:16]


def _require_base(checkpoints: Sequence[SavedCheckpoint], base: str) -> None:
    """Raise ConfigError unless ``base`` holds the weights that a run began with.

    An adapter in a checkpoint is laid over them. Checkpoints of earlier versions, without their digest, pass.
    """
    stated = {saved.path: saved.data["model.path"] for saved in checkpoints if "model.path" in saved.data}
    digest = fingerprint_weights(base) if stated else ""
    for path, stated_digest in stated.items():
        if stated_digest != digest:
            raise ConfigError(f"model.path: {base} has other weights by now than those that {path} was trained from")


def _read(saved: SavedCheckpoint, base: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a checkpoint of what began as the model in ``base``, an adapter merged into them."""
    import torch

    student = _load_student(saved, base)
    with torch.no_grad():
        yield from student.file_tensors(getattr(torch, saved.dtype))


def _load_student(saved: SavedCheckpoint, base: str) -> Student:
    """Load the student of a checkpoint of what began as the model in ``base``.

    Raises WeightsDeleted where the run, which goes on, has deleted the checkpoint.
    """
    import torch
    from transformers.utils.logging import disable_progress_bar

    from gkd.actor.loading import load
    from gkd.actor.state import load_state

    disable_progress_bar()  # of files that are read in an instant
    student = load(base, lora=_lora(saved), dtype=getattr(torch, saved.dtype))
    try:
        load_state(student, None, saved.rank_files)
    except RunFailed:
        if is_complete(saved.path):
            raise
        raise WeightsDeleted(f"its run deleted {saved.path} before it was read") from None
    return student


def _lora(saved: SavedCheckpoint) -> Lora:
    return Lora.model_validate(saved.config["actor"]["lora"])


def export(saved: SavedCheckpoint, out: Path, unfinished: Path) -> None:
    """Write a checkpoint as a Hugging Face model directory ``out``, as the run itself writes its student.

    It is written in the directory ``unfinished`` within ``out``, which may be where a volume is mounted: what lies
    beside that is on another disk. config.json, without which no model is read, comes last.
    Raises ConfigError where the model that was trained is not where it was, and where an adapter's is another.
    """
    import torch

    from gkd.actor.pretrained import write_pretrained

    base = check_causal_lm(saved.model, "the model that was trained")
    if _lora(saved).r is not None:
        _require_base([saved], base)
    student = _load_student(saved, base)
    new = unfinished / "model"
    try:
        with torch.no_grad():
            write_pretrained(student, base, _lora(saved), getattr(torch, saved.dtype), new, writes=True)
        move_files(new, out, last="config.json")
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _read_model(path: str) -> Iterator[tuple[str, Tensor]]:
    """Yield the weights of a model's files."""
    from safetensors import safe_open

    for file in sorted(Path(path).glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            for name in opened.keys():  # noqa: SIM118 (it is no mapping)
                yield name, opened.get_tensor(name)


def settings_of(config: Config, models: RunModels, run: Path, with_sets: bool) -> dict[str, Any]:
    """Return the settings of an evaluation that samples as the run with ``config`` does.

    ``with_sets``: on its own questions, those of ``data.val_files`` as the set ``val`` and ``data.val_sets``, with its
    rewards but those of a group of workers.
    """
    rollout, sets, reward = config.rollout, dict[str, Any](), dict[str, Any]()
    if with_sets:
        data = config.data
        shared = {name: getattr(data, name) for name in PROMPT_SETTINGS if getattr(data, name) is not None}
        functions = config.reward.functions_scored_by(None) if config.algorithm.policy_weight else []
        files = find_files(config, log.debug).val_files
        sets["val"] = {**shared, "files": files, "limit": data.val_limit, "rewards": functions}
        for name, val_set in data.val_sets.items():
            sets[name] = val_set.model_dump(exclude_defaults=True, exclude={"every"})
        others = ("functions", "weights", "set_functions")
        reward = config.reward.with_functions(list(dict.fromkeys([*config.reward.set_functions, *functions])))
        reward = {name: value for name, value in reward.items() if name not in others}
    return {
        f"models.{START}": models.base,
        "model.dtype": config.model.dtype,
        "data.max_prompt_length": config.data.max_prompt_length,
        "trainer.seed": config.trainer.seed,
        "rollout.engine": rollout.engine,
        "rollout.max_response_length": rollout.max_response_length,
        "rollout.stop": rollout.stop,
        "evaluate.output_dir": run / "evaluate",
        **({"evaluate.sets": sets} if sets else {}),
        **({"reward": reward} if reward else {}),
    }

"""A task of one's own: a student and prompts that lie in one directory."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel
from transformers import AutoConfig

from gkd.config import Config as RunConfig
from gkd.data.task import ReportFn, TaskInputs


class Fixed:
    """Takes ``DIR/student``, ``DIR/train.jsonl`` and ``DIR/val.jsonl``; for rewards alone, without a teacher."""

    class Config(BaseModel):
        directory: str

    def __init__(self, settings: Config, config: RunConfig) -> None:
        self.directory, self.seed = Path(settings.directory), config.trainer.seed

    def make(self, report: ReportFn) -> TaskInputs:
        report(f"taken from {self.directory}")
        files = [[str(self.directory / f"{name}.jsonl")] for name in ("train", "val")]
        return TaskInputs(str(self.directory / "student"), None, *files)

    def model_configs(self) -> Mapping[str, Mapping[str, Any]]:
        return {"student": AutoConfig.from_pretrained(self.directory / "student").to_dict()}

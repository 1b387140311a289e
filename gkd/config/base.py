"""What every section of the configuration is, and the pools of GPUs that groups of workers request."""

from __future__ import annotations

import re
import types
from collections.abc import Collection, Mapping
from contextlib import suppress
from enum import Enum
from functools import cache, reduce
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self, Union, get_args, get_origin

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator


def user_path(text: str) -> Path:
    """Return a path as people write it: ``~`` is the home directory, and a user's that there is not stays as it is."""
    try:
        return Path(text).expanduser()
    except RuntimeError:  # no such user, or no home
        return Path(text)


def quote(text: str) -> str:
    """Return ``text`` as the value of an override: in quotes, as Hydra's grammar has them.

    Within them a backslash stands for itself, but before a quote, and where it is the last character.
    """
    return "'" + re.sub(r"(\\*)('|$)", lambda m: m[1] * 2 + ("\\'" if m[2] else ""), text) + "'"


def escape(value: Any) -> Any:
    """Return a value, or a tree of such, whose texts stand for themselves: ``${`` begins no interpolation in them."""
    if isinstance(value, Mapping):
        return {name: escape(below) for name, below in value.items()}
    if isinstance(value, list | tuple):
        return [escape(below) for below in value]
    if isinstance(value, str | Path):
        return re.sub(r"(\\*)\$\{", r"\1\1\\${", str(value))  # backslashes before it are doubled
    return value


def parse_gpus(value: Any) -> list[int] | None:
    """Parse GPU indices on each node from a range ``0-1``, a list ``'4,5,6,7'`` or ``[4, 5]``, or a number ``7``.

    Returns them sorted, or None for None. Raises ValueError on anything else, on a repeated or a negative index.
    """
    if value is None:
        return None
    parts = value if isinstance(value, list) else str(value).split(",")
    if not parts:
        raise ValueError("the list of GPUs is empty")
    indices: list[int] = []
    for part in parts:
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(part))
        if match is None:
            raise ValueError("expected a range such as 0-3, a list such as '4,5,6,7', or one number")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {first}-{last} runs backwards")
        if last - first >= 1024:
            raise ValueError(f"the range {first}-{last} names more GPUs than any node has")
        indices += range(first, last + 1)
    if len(set(indices)) != len(indices):
        raise ValueError("an index is named twice")
    return sorted(indices)


LONGEST_S = 1e6
"""Seconds that a wait may have: where it is one call of the system, some can express no more than 2.1 million."""
WaitSeconds = Annotated[float, Field(gt=0, le=LONGEST_S)]
GroupName = Literal["actor", "rollout", "teacher", "reference", "reward_model"]
GpuRange = Annotated[list[int] | None, BeforeValidator(parse_gpus)]
GpuRangeOfNode = Annotated[list[int], BeforeValidator(parse_gpus)]

GROUP_OF = {
    "trainer": "actor",
    "rollout": "rollout",
    "teacher": "teacher",
    "reference": "reference",
    "reward_model": "reward_model",
}
"""The group of workers that a section's pool is for."""
SECTION_OF = {group: section for section, group in GROUP_OF.items()}
SCORERS = ("teacher", "reference", "reward_model")
"""Groups that score what was sampled."""

DEFAULT_SLOTS = 128
OWN_CLASS = "your own class as package.module:name or FILE.py:name"


class Settings(BaseModel):
    """Base of every section: unknown keys are refused, values have YAML's types and are finite, nothing changes."""

    model_config: ClassVar[ConfigDict] = ConfigDict(
        extra="forbid", frozen=True, strict=True, validate_default=True, allow_inf_nan=False
    )

    @model_validator(mode="before")
    @classmethod
    def _convert_values(cls, values: Any) -> Any:
        """Convert a text where a list of texts is expected to a list of one, 1e3 where a whole number is to one, a text
        that is a number (``${oc.env:NAME}``) to it, and what YAML has of tuples, sets, paths and members of an
        enumeration to these; alike within lists and mappings.
        """
        if not isinstance(values, dict):
            return values
        kinds = _kinds_by_setting(cls)
        return {name: _convert(value, kinds[name]) if name in kinds else value for name, value in values.items()}

    def read_setting(self, name: str) -> tuple[Any, Any]:
        """Return the value of a setting, by its dotted name, and its default."""
        *above, last = name.split(".")
        section = reduce(getattr, above, self)
        return getattr(section, last), type(section).model_fields[last].default

    def with_settings(self, settings: Mapping[str, Any]) -> Self:
        """Return it with settings, by dotted names, replaced. Values are not checked again."""
        changed: dict[str, Any] = {}
        for key, value in settings.items():
            name, _, below = key.partition(".")
            changed[name] = changed.get(name, getattr(self, name)).with_settings({below: value}) if below else value
        return self.model_copy(update=changed)


@cache
def _kinds_by_setting(section: type[BaseModel]) -> dict[str, list[Any]]:
    """Return the types that each setting of a section may have."""
    return {name: _kinds(field.annotation) for name, field in section.model_fields.items()}


def _convert(value: Any, kinds: Collection[Any]) -> Any:
    if isinstance(value, list | dict):
        return _convert_parts(value, kinds)
    if not isinstance(value, str | float) or type(value) in kinds:
        return value
    if isinstance(value, float):
        return int(value) if value.is_integer() and int in kinds else value
    for kind in kinds:
        if kind is Path or (isinstance(kind, type) and issubclass(kind, Enum) and value in [one.value for one in kind]):
            return kind(value)
    if str not in kinds and (number := _read_number(value, kinds)) is not None:
        return number
    return [value] if list[str] in kinds else value


def _convert_parts(value: list[Any] | dict[str, Any], kinds: Collection[Any]) -> Any:
    """Return a list or a mapping with its parts converted, a list as a tuple or a set where that is expected."""
    for made in (dict,) if isinstance(value, dict) else (list, tuple, set, frozenset):
        arguments = [get_args(kind) for kind in kinds if (get_origin(kind) or kind) is made]
        parts = [
            kind for args in arguments for part in args[made is dict :] if part is not Ellipsis for kind in _kinds(part)
        ]
        if isinstance(value, dict) and arguments:
            return {name: _convert(part, parts) for name, part in value.items()}
        if arguments:
            return made(_convert(part, parts) for part in value)
    return value


def _read_number(text: str, kinds: Collection[Any]) -> int | float | bool | None:
    """Return the number, or true or false, that a text is, if it may be one of ``kinds``; else None."""
    literals = [value for kind in kinds if get_origin(kind) is Literal for value in get_args(kind)]
    truth = {"true": True, "false": False}.get(text.lower())
    if truth is not None and (bool in kinds or any(value is truth for value in literals)):
        return truth
    if text in literals:
        return None
    if int in kinds:
        with suppress(ValueError):
            return int(text)
    try:
        number = float(text)
    except ValueError:
        return None
    if int in kinds and number.is_integer():
        return int(number)
    return number if float in kinds else None


def _kinds(annotation: Any) -> list[Any]:
    """Return the types that a value may have, without what else is stated of them."""
    if get_origin(annotation) is Annotated:
        return _kinds(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [kind for part in get_args(annotation) for kind in _kinds(part)]
    if get_origin(annotation) is list and _kinds(get_args(annotation)[0]) == [str]:
        return [list[str]]
    return [annotation]


def sections_below(section: type[Settings], prefix: str) -> dict[str, tuple[type[Settings], str]]:
    """Return the fields of ``section`` that are sections: their class, and how the names of their settings begin.

    A section for each of several names, such as a set of questions, has ``NAME`` in place of one.
    """
    below = {}
    for name, field in section.model_fields.items():
        kind, begins = field.annotation, f"{prefix}{name}."
        if get_origin(kind) is dict:
            kind, begins = get_args(kind)[1], f"{begins}NAME."
        if isinstance(kind, type) and issubclass(kind, Settings):
            below[name] = kind, begins
    return below


class Pool(Settings):
    """GPUs of one group of workers: ``n_gpus_per_node`` on each of ``nnodes`` nodes, one worker a GPU."""

    n_gpus_per_node: int = Field(
        1,
        ge=1,
        description="GPUs of this group on each node, one worker a GPU (slime: actor_num_gpus_per_node, "
        "rollout_num_gpus; prime-rl: num_train_gpus, num_infer_gpus); null: as many as gpus names, or 1",
    )
    nnodes: int = Field(
        1,
        ge=1,
        description="nodes this group spans (slime: actor_num_nodes, rollout_num_gpus); null: as many as gpus_by_node "
        "has ranges, or 1",
    )
    gpus: GpuRange = Field(
        None, description="exact GPU indices on each node: 0-1, '4,5,6,7' or 7; null: the next free ones"
    )
    gpus_by_node: list[GpuRangeOfNode] | None = Field(
        None,
        description="instead of gpus: a range for each node, as [0-3,4-7]; groups that name the same indices so are "
        "on different nodes",
    )
    colocate_with: GroupName | None = Field(
        None,
        description="group whose GPUs this one works on as well, its first ones or those that gpus names (TRL: "
        "vllm_mode=colocate; verl: one resource pool; slime: --colocate); null: GPUs of its own, as where the run does "
        "not have that group",
    )

    @model_validator(mode="before")
    @classmethod
    def _count_from_range(cls, values: Any) -> Any:
        # A range states how many GPUs there are, so the count need not be written twice.
        if not isinstance(values, dict):
            return values
        by_node = values.get("gpus_by_node")
        ranges = by_node if isinstance(by_node, list) and by_node else [values.get("gpus")]
        try:
            indices = parse_gpus(ranges[0])
        except ValueError:  # the field's own check names the key
            indices = None
        counted = {"n_gpus_per_node": len(indices or [0]), "nnodes": len(ranges)}
        return {**values, **{name: n for name, n in counted.items() if values.get(name) is None}}

    @model_validator(mode="after")
    def _ranges_and_counts_agree(self) -> Pool:
        if self.gpus is not None and self.gpus_by_node is not None:
            raise ValueError("gpus and gpus_by_node exclude each other")
        if self.gpus is not None and len(self.gpus) != self.n_gpus_per_node:
            raise ValueError(f"gpus names {len(self.gpus)} GPUs but n_gpus_per_node is {self.n_gpus_per_node}")
        if self.gpus_by_node is None:
            return self
        lengths = [len(indices) for indices in self.gpus_by_node]
        if len(set(lengths)) > 1:
            counts = ", ".join(map(str, lengths))
            raise ValueError(f"gpus_by_node has ranges of {counts} GPUs: a group has as many on each of its nodes")
        if lengths != [self.n_gpus_per_node] * self.nnodes:
            raise ValueError(
                f"gpus_by_node names {(lengths or [0])[0]} GPUs on each of {len(lengths)} nodes but "
                f"n_gpus_per_node is {self.n_gpus_per_node} and nnodes is {self.nnodes}"
            )
        return self

    def ranges(self) -> list[list[int]] | None:
        """Return exact GPU indices: one list for every node alike, or one for each; None where any will do."""
        return self.gpus_by_node or (None if self.gpus is None else [self.gpus])

    @property
    def n_workers(self) -> int:
        """Workers of the group over all its nodes."""
        return self.n_gpus_per_node * self.nnodes

    @property
    def width(self) -> int:
        """GPUs that one engine spans."""
        return 1

    @property
    def n_engines(self) -> int:
        """Engines of the pool."""
        return self.n_workers // self.width


class Engine(Pool):
    """A pool of vLLM engines, one for every ``tensor_parallel_size`` GPUs."""

    tensor_parallel_size: int = Field(
        1,
        ge=1,
        description="GPUs one engine spans, which divide n_gpus_per_node (TRL: vllm_tensor_parallel_size; verl: "
        "tensor_model_parallel_size; slime: rollout_num_gpus_per_engine)",
    )
    across_nodes: bool = Field(
        False, description="an engine may span nodes: tensor_parallel_size may be n_gpus_per_node times some of nnodes"
    )
    gpu_memory_utilization: float = Field(
        0.85,
        gt=0,
        le=1,
        description="share of a GPU's memory the engine may use (TRL: vllm_gpu_memory_utilization; slime: "
        "sglang_mem_fraction_static)",
    )
    kv_cache_gb: int | None = Field(
        None,
        ge=1,
        description="size of the key-value cache of an engine, GiB a device (vLLM: kv_cache_memory_bytes); null: 1 on "
        "a CPU; on a GPU what gpu_memory_utilization leaves, in training of a small model no more than it can fill",
    )
    max_num_seqs: int | None = Field(
        None,
        ge=1,
        description="sequences one engine works on at the same time; null: in training on GPUs what its cache holds of "
        "the samples that the schedule has under way, otherwise 128",
    )
    enforce_eager: bool = Field(False, description="no CUDA graphs and no compilation on a GPU; a CPU never has them")

    @model_validator(mode="after")
    def _engines_fill_the_pool(self) -> Engine:
        tp, n = self.tensor_parallel_size, self.n_gpus_per_node
        if n % tp == 0:
            return self
        if tp % n or not self.across_nodes:
            hint = "" if tp % n else "; across_nodes=true lets an engine span nodes, over a slower link"
            raise ValueError(f"tensor_parallel_size={tp} does not divide n_gpus_per_node={n}{hint}")
        if self.nnodes % self.nodes_an_engine:
            raise ValueError(
                f"tensor_parallel_size={tp} takes {self.nodes_an_engine} nodes of n_gpus_per_node={n}, which does not "
                f"divide nnodes={self.nnodes}"
            )
        return self

    @property
    def slots(self) -> int:
        """Sequences that one engine works on at the same time, where no plan states how many."""
        return DEFAULT_SLOTS if self.max_num_seqs is None else self.max_num_seqs

    @property
    def cpu_cache_gb(self) -> int:
        """The key-value cache of an engine on a CPU, GiB."""
        return self.kv_cache_gb or 1

    @property
    def nodes_an_engine(self) -> int:
        """Nodes that one engine spans."""
        return max(1, self.tensor_parallel_size // self.n_gpus_per_node)

    @property
    def width(self) -> int:
        """GPUs that one engine spans."""
        return self.tensor_parallel_size

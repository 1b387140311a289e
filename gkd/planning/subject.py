"""What is planned: the models' shapes, the batch, and the card, from a configuration alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gkd.algorithms.top_k import top_k_wanted
from gkd.cluster.layout import idle_nodes, requests_of, solve
from gkd.config import GROUPS, Config
from gkd.data import sorting
from gkd.data.builtin import ModelRecipe, recipes
from gkd.errors import ConfigError
from gkd.planning.cards import Card
from gkd.planning.families import read_shape, shape_of
from gkd.planning.shape import ModelShape
from gkd.planning.sizes import shape_of_size

OWN = ("gpus", "gpus_by_node", "colocate_with")  # settings of a pool for which GPUs
BUILTIN_HEAD_DIM = 32  # gkd.data.warmup, which imports torch


@dataclass(frozen=True, slots=True)
class Models:
    """Shapes of the student, of the teacher (of several the largest), the reward model, and a reference that is not
    the student; None where none is asked or it is outside the cluster.
    """

    student: ModelShape
    teacher: ModelShape | None
    reward_model: ModelShape | None = None
    reference: ModelShape | None = None

    def of(self, group: str) -> ModelShape:
        """The shape a group loads."""
        if group == "reference":
            return self.reference or self.student
        if group not in ("teacher", "reward_model"):
            return self.student
        found = self.teacher if group == "teacher" else self.reward_model
        assert found is not None, f"a group {group} has a model"
        return found


@dataclass(frozen=True, slots=True)
class Work:
    """One step's batch: ``samples`` of ``prompt`` + ``response`` tokens each on average, the longest of ``longest``.

    ``prompts`` different ones among them; K log-probabilities a position come from the teacher.
    """

    samples: int
    prompts: int
    prompt: int
    response: int
    longest: int
    top_k: int

    @property
    def tokens(self) -> int:
        """All of them."""
        return self.samples * (self.prompt + self.response)


@dataclass(frozen=True, slots=True)
class Subject:
    """A configuration with everything that its plan follows from. ``compute``: bytes of a number in the engines.

    ``nodes``: how many GPUs each node has, for advice; None where that is open.
    """

    config: Config
    models: Models
    card: Card
    nodes: tuple[int, ...] | None = None

    @property
    def compute(self) -> int:
        """Bytes of a number of the type that models compute in."""
        return 4 if self.config.model.dtype_on("cpu" if self.card.is_cpu else "cuda") == "float32" else 2

    @property
    def gpus_per_node(self) -> int:
        """Most GPUs of a node that advice is for."""
        return self.config.plan.gpus_per_node if self.nodes is None else max(self.nodes)

    @property
    def hosts(self) -> dict[str, str]:
        """Of every group that computes on the devices of another, which that is; on a CPU all share its cores."""
        if not self.card.is_cpu:
            return self.config.hosts()
        return {GROUPS.get(section, section): "actor" for section, _ in self.config.pools()}

    def work(self) -> Work:
        """The batch of a step."""
        config, limits = self.config, [self.models.student.positions]
        if self.models.teacher is not None:
            limits.append(self.models.teacher.positions)
        longest = config.data.max_prompt_length + config.rollout.max_response_length
        longest = min([longest, *(limit for limit in limits if limit is not None)])
        response = config.plan.response_length or config.rollout.max_response_length
        prompt = config.plan.prompt_length or max(1, longest - config.rollout.max_response_length)
        k = top_k_wanted(config, self.models.student.vocabulary) if config.algorithm.distils else 0
        prompts = config.trainer.batch_size
        return Work(prompts * config.rollout.n, prompts, prompt, response, longest, k)


def nodes_of(config: Config) -> tuple[int, ...] | None:
    """GPUs of every node that ``plan.nodes`` names; None where it names none, or its groups have no room on them."""
    nodes = tuple(config.plan.nodes or ())
    return nodes if nodes and has_room(config, nodes) else None


def has_room(config: Config, nodes: Sequence[int]) -> bool:
    """Whether nodes with so many GPUs each, and nobody on them, have room for all groups."""
    requests = requests_of(config)
    most = sum(request.nnodes for request in requests)  # of nodes of one size more are of no use
    enough = [size for size, count in Counter(nodes).items() for _ in range(min(count, most))]
    return solve(requests, idle_nodes(enough), 0.0) is not None


def models_of(config: Config) -> Models:
    """Shapes by path, by size, or of the built-in task. Raises ConfigError where a model cannot be found."""
    if config.uses_builtin_task:
        teacher, student = (_builtin(recipe) for recipe in recipes(config.builtin, config.trainer.seed))
        rates = config.reward_model.model.path if config.asks_reward_model else None
        return Models(
            student,
            teacher if config.algorithm.needs_teacher else None,
            None if rates is None else read_shape(rates, "reward_model.model.path"),
        )
    student = _model(config.model.path, config.model.size, "model")
    rates, refers = config.reward_model.model.path, config.reference.model.path
    return Models(
        student,
        _teacher(config),
        read_shape(rates, "reward_model.model.path") if rates is not None and config.asks_reward_model else None,
        read_shape(refers, "reference.model.path") if refers is not None else None,
    )


def _teacher(config: Config) -> ModelShape | None:
    given = config.teacher.model
    if config.teacher.models:
        several = [read_shape(path, f"teacher.models.{name}") for name, path in config.teacher.models.items()]
        return max(several, key=lambda shape: shape.n_parameters)
    if not config.algorithm.needs_teacher or (given.path is None and given.size is None):
        if config.algorithm.needs_teacher and config.teacher.server_ip is None:
            raise ConfigError(
                f"algorithm.name={config.algorithm.name} needs a teacher: name teacher.model.path, teacher.model.size "
                "or teacher.server_ip"
            )
        return None
    return _model(given.path, given.size, "teacher.model")


def _model(path: str | None, size: str | None, setting: str) -> ModelShape:
    if path is not None:
        return read_shape(path, f"{setting}.path")
    assert size is not None, "a model is given by path or by size"
    return shape_of_size(size)


def _builtin(recipe: ModelRecipe) -> ModelShape:
    return shape_of(
        {
            "model_type": "llama",
            "hidden_size": recipe.width,
            "intermediate_size": 2 * recipe.width,
            "num_hidden_layers": recipe.layers,
            "num_attention_heads": recipe.heads,
            "head_dim": BUILTIN_HEAD_DIM,
            "vocab_size": len(sorting.VOCABULARY),
            "max_position_embeddings": 128,
        }
    )


def changed(config: Config, settings: Mapping[str, Any]) -> Config:
    """The configuration with dotted settings replaced. Values are not checked again."""
    for key, value in settings.items():
        config = _with(config, key.split("."), value)
    return config


def _with(section: Any, path: list[str], value: Any) -> Any:
    inner = value if len(path) == 1 else _with(getattr(section, path[0]), path[1:], value)
    return section.model_copy(update={path[0]: inner})


def apart(subject: Subject) -> Subject:
    """Without ranges of GPUs, and every group on some of its own."""
    config = subject.config
    settings = {f"{section}.{name}": None for section, _ in config.pools() for name in OWN}
    return replace(subject, config=changed(config, settings | no_longer(config)))


def no_longer(config: Config) -> dict[str, Any]:
    """Settings that are about the nodes there are, or about GPUs that are shared, as they are without."""
    turns = {"cluster.offload": "auto"} if config.cluster.offload is True else {}
    return turns if config.plan.nodes is None else turns | {"plan.nodes": None}

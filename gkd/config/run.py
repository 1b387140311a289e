"""The configuration of one run, as one object."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import combinations
from typing import Annotated

from pydantic import AfterValidator, Field

from gkd.config.actor import Actor
from gkd.config.base import GROUP_OF, SECTION_OF, Pool, Settings
from gkd.config.cluster import Cluster, Weights
from gkd.config.data import Data
from gkd.config.device import Device
from gkd.config.evaluation import Evaluate
from gkd.config.groups import Model, Reference, RewardModel, Rollout, Teacher, Trainer
from gkd.config.learning import Algorithm
from gkd.config.plan import Plan
from gkd.config.registry import shorten_name
from gkd.config.rewards import Reward
from gkd.config.schedule import Schedule


def _check_rising(band: list[float]) -> list[float]:
    if band[0] >= band[1]:
        raise ValueError("a band goes from its lower to its upper end")
    return band


Band = Annotated[list[float], Field(min_length=2, max_length=2), AfterValidator(_check_rising)]


class Watch(Settings):
    """Thresholds."""

    truncation_rate: float = Field(
        0.05, ge=0, le=1, description="share of responses cut off by rollout.max_response_length"
    )
    distill_kl: Band = Field([0.0, 5.0], description="band of distill/reverse_kl, nats a token")
    reference_kl: Band = Field([-0.01, 0.5], description="band of actor/kl_reference, nats a token")
    reward_kl: dict[str, Band] = Field(
        {}, description="by the name of a reward, band of reward/NAME/kl, nats a token, as watch.reward_kl.NAME=[0,0.5]"
    )
    mismatch_kl: float = Field(0.02, gt=0, description="largest mismatch/kl between sampler and trainer, nats a token")
    no_advantage_steps: int = Field(
        20, ge=1, description="steps in a row in which every advantage is 0, so that rewards teach nothing"
    )


class Config(Settings):
    """One run."""

    recipe: str = Field("none", description="name of the recipe, by +recipe=NAME; part of the default output directory")
    placement: str = Field(
        "auto", description="name of the placement, whose ranges count the GPUs that a node lets be seen, from 0"
    )
    model: Model = Model()
    teacher: Teacher = Field(default_factory=Teacher)
    reference: Reference = Field(default_factory=Reference)
    reward_model: RewardModel = Field(default_factory=RewardModel)
    trainer: Trainer = Trainer()
    rollout: Rollout = Field(default_factory=Rollout)
    actor: Actor = Actor()
    data: Data = Data()
    algorithm: Algorithm = Field(default_factory=Algorithm)
    reward: Reward = Reward()
    schedule: Schedule = Schedule()
    weights: Weights = Field(default_factory=Weights)
    cluster: Cluster = Cluster()
    watch: Watch = Watch()
    plan: Plan = Plan()
    models: dict[str, str] = Field(
        {}, description="what gkd evaluate measures: by name, the directory or locally cached name of a model"
    )
    evaluate: Evaluate = Field(default_factory=Evaluate)

    def pools(self) -> Iterator[tuple[str, Pool]]:
        """Return sections that own GPUs, in the order these are handed out: trainer (the actor), rollout, ...

        Where models are evaluated there are only the engines that sample from them.
        """
        if self.evaluates:
            yield "rollout", self.rollout
            return
        yield "trainer", self.trainer
        yield "rollout", self.rollout
        if self.algorithm.needs_teacher and self.teacher.server_ip is None:
            yield "teacher", self.teacher
        if self.has_reference_group:
            yield "reference", self.reference
        if self.has_reward_model_group:
            yield "reward_model", self.reward_model

    def groups(self) -> dict[str, Pool]:
        """Return the groups of workers, with their pools, in the order of :meth:`pools`."""
        return {GROUP_OF[section]: pool for section, pool in self.pools()}

    def hosts(self) -> dict[str, str]:
        """Return, for every group that works on GPUs of another, which group these belong to.

        A group that the run does not have passes on those that would share with it to the one it would share with.
        Raises ValueError where groups share with each other in a circle.
        """
        present = self.groups()
        hosts: dict[str, str] = {}
        for group in present:
            host, chain = group, [group]
            while (following := getattr(self, SECTION_OF[chain[-1]]).colocate_with) is not None:
                if following in chain:
                    raise ValueError(f"colocate_with goes in a circle: {' -> '.join([*chain, following])}")
                chain.append(following)
                host = following if following in present else host
            if host != group:
                hosts[group] = host
        return hosts

    def may_share(self) -> set[frozenset[str]]:
        """Return pairs of groups that may be on the same GPU."""
        hosts = self.hosts()
        colocated = [
            {host, *(group for group, group_host in hosts.items() if group_host == host)}
            for host in set(hosts.values())
        ]
        return {frozenset(pair) for groups in colocated for pair in combinations(sorted(groups), 2)}

    def groups_on_actor_gpus(self) -> list[str]:
        """Return groups besides the actor that work on its GPUs, in the order of :meth:`pools`."""
        shared = self.may_share()
        return [group for group in self.groups() if frozenset(("actor", group)) in shared]

    def own_gpus(self) -> str:
        """Return the overrides with which no group works on the actor's GPUs."""
        return " ".join(f"{group}.colocate_with=null" for group in self.groups_on_actor_gpus())

    def temperatures(self) -> Iterator[tuple[str, float]]:
        """Yield settings of temperatures that the engines sample at, but 0, at which a set takes the likeliest token.

        An endpoint is left out: it refuses by itself what it does not sample at.
        """
        section, sets = "data.val_sets", self.data.val_sets
        if self.evaluates:
            section, sets = "evaluate.sets", self.evaluate.sets if self.models else {}
            for name in self.evaluate.strategies if self.models else ():
                temperature = getattr(self.evaluate.settings_of(name), "temperature", None)
                if isinstance(temperature, int | float) and temperature:  # a user's own may be anything
                    yield f"evaluate.{shorten_name(name)}.temperature", temperature
        else:
            yield "rollout.temperature", self.rollout.temperature
        for name, settings in sets.items():
            if settings.temperature:
                yield f"{section}.{name}.temperature", settings.temperature

    def algorithm_on(self, device: Device) -> Algorithm:
        """Return ``algorithm`` with ``importance_sampling.level`` decided for models that compute on ``device``."""
        algorithm, lora = self.algorithm, self.actor.lora
        if algorithm.importance_sampling.level != "auto":
            return algorithm
        differ = self.model.dtype_on(device) != "float32" or lora.quantize is not None or lora.dropout > 0
        differ = differ or self.schedule.max_staleness > 0
        level = "token" if differ and algorithm.weighs_samples else None
        return algorithm.with_settings({"importance_sampling.level": level})

    @property
    def several_updates(self) -> str | None:
        """Which setting makes several optimizer steps of a batch; None where it is one."""
        actor = self.actor
        if actor.epochs > 1:
            return f"actor.epochs={actor.epochs} learns from each batch several times"
        if actor.mini_batch_size is not None and actor.mini_batch_size < self.trainer.batch_size * self.rollout.n:
            return f"actor.mini_batch_size={actor.mini_batch_size} makes several updates of a batch"
        return None

    @property
    def streaming_obstacle(self) -> str | None:
        """Why gradients cannot be added up before the whole batch is there; None where they can."""
        algorithm = self.algorithm
        if self.several_updates is not None:
            return self.several_updates
        if algorithm.policy_weight and algorithm.dynamic_sampling.max_rounds > 1:
            rounds = algorithm.dynamic_sampling.max_rounds
            return f"algorithm.dynamic_sampling.max_rounds={rounds} chooses from the whole batch what is learned from"
        if algorithm.policy_weight and algorithm.advantage.selected_class.needs_batch:
            return f"algorithm.advantage.name={algorithm.advantage.name} looks at all groups of a batch"
        if self.cluster.offload is True:
            return "the actor is offloaded while engines on its GPUs sample (cluster.offload)"
        return None

    @property
    def streams(self) -> bool:
        """Whether the actor adds up gradients while a batch is being sampled; ``cluster.offload`` is decided."""
        if self.schedule.streaming == "auto":
            samples = not self.algorithm.is_supervised  # otherwise a whole batch is there at once
            return samples and self.streaming_obstacle is None and not self.groups_on_actor_gpus()
        return self.schedule.streaming

    @property
    def stops(self) -> tuple[str, ...]:
        """The texts that may end a response: those of ``rollout``, and those of single sets of questions."""
        sets = (*self.data.val_sets.values(), *self.evaluate.sets.values())
        return tuple(dict.fromkeys([*self.rollout.stop, *(text for eval_set in sets for text in eval_set.stop or ())]))

    @property
    def evaluates(self) -> bool:
        """Whether models are to be measured, and none trained."""
        return bool(self.models or self.evaluate.endpoints)

    @property
    def has_reference_group(self) -> bool:
        """Whether the reference is a group of its own; with LoRA it is the actor without its adapter."""
        return self.algorithm.needs_reference and self.actor.lora.r is None

    @property
    def has_reward_model_group(self) -> bool:
        """Whether one of the rewards is a model's, in a group of its own."""
        return self.algorithm.policy_weight > 0 and bool(self.reward.functions_scored_by("reward_model"))

    @property
    def has_group_rewards(self) -> bool:
        """Whether a reward is given all samples of a prompt together."""
        return self.algorithm.policy_weight > 0 and bool(self.reward.group_functions())

    @property
    def uses_task(self) -> bool:
        """Whether ``data.task`` makes the run's models and data: no model is named."""
        return self.model.path is None and self.model.size is None and not self.evaluates

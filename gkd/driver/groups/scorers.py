"""The groups whose models score samples, teacher, reference and reward model: built, served and reached alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import ray

from gkd.cluster.layout.assignment import Report
from gkd.cluster.workers.colocation import SLACK_S
from gkd.cluster.workers.engines import Engines
from gkd.cluster.workers.environment import environment
from gkd.cluster.workers.group import Group, PendingCall, gather
from gkd.cluster.workers.placement import Placement
from gkd.config import Config, RewardModel, Scorer
from gkd.config.base import SCORERS
from gkd.config.groups import scorer_group
from gkd.config.top_k import required_top_k, top_k_for_validation
from gkd.data.tokenizer import tokenizer_hash
from gkd.driver.groups.engines import StartWorker, make_restart_policy, prepare_restarts
from gkd.driver.inputs.find import Inputs
from gkd.scoring.address import Key, external_addresses, external_key, key_path
from gkd.scoring.watch import ScorerReplicas, ScorerWatch
from gkd.scoring.worker import ScorerSpec

WORKER, FOLLOWER = "gkd.scoring.worker:ScoringWorker", "gkd.scoring.worker:scoring_follower"


@dataclass(frozen=True, slots=True)
class Scorers:
    """The engines of every group that scores, by name, and the key their sockets need.

    ``local``: they and all their clients are on one machine, so that nobody else need reach them.
    """

    config: Config
    inputs: Inputs
    key: Key
    engines: dict[str, Engines] = field(default_factory=dict)
    local: bool = True

    @staticmethod
    def from_groups(config: Config, inputs: Inputs, groups: Mapping[str, Group], rollout: Group) -> Scorers:
        """Find the groups that score among ``groups``. Raises ConfigError where the user's key cannot be read."""
        limit = config.cluster.start_timeout_s
        engines: dict[str, Engines] = {}
        for name in SCORERS:
            if name in groups:
                engines[name] = Engines.from_group(groups[name], _settings(config, name).width, limit)
        connected = (rollout, *(group.leaders for group in engines.values()))
        ips = {report.ip for group in connected for report in group.reports} | {ray.util.get_node_ip_address()}
        return Scorers(config, inputs, _key(config), engines, len(ips) == 1)

    @property
    def groups(self) -> dict[str, Group]:
        """The engines' leaders, by group."""
        return {name: engines.leaders for name, engines in self.engines.items()}

    def builds(self) -> dict[str, Callable[[], list[PendingCall]]]:
        """Return, by group, how to start loading its models."""
        return {name: partial(self._build, name, engines) for name, engines in self.engines.items()}

    def _build(self, name: str, engines: Engines) -> list[PendingCall]:
        args = [self._worker_arguments(name, engine, report) for engine, report in enumerate(engines.leaders.reports)]
        return engines.submit_build(WORKER, FOLLOWER, args, self._environment(name))

    def _environment(self, name: str) -> dict[str, str]:
        models = [self.inputs.scorers[model] for model in self._models(name)]
        return environment(self.groups[name].reports[0].device, models, self.config.cluster.cpu_threads)

    def _worker_arguments(self, name: str, engine: int, report: Report) -> tuple[Scorer | RewardModel, ScorerSpec]:
        """Return what the worker of one engine, of which ``report`` is, is built with."""
        settings, models = _settings(self.config, name), self._models(name)
        if isinstance(settings, Scorer):
            # A server of this run's own takes exactly the sequences and the K that this run has; less memory is set
            # aside for them.
            longest = settings.max_model_len or self.inputs.max_length
            settings = settings.model_copy(update={"max_model_len": longest, "max_top_k": max(1, self._top_k(name))})
        model = models[engine % len(models)]
        return settings, ScorerSpec(
            model,
            self.config.model.dtype_on(report.device),
            self.inputs.scorers[model],
            report.device,
            self._tokenizer(name),
            "127.0.0.1" if self.local else report.ip,
            self.key,
            name in self.list_sleeping_groups(),
            () if _settings(self.config, name).rates else tuple(self.inputs.model.eos_ids),
        )

    def watch(self, placement: Placement, clients: Mapping[str, dict[str, Any]]) -> ScorerWatch:
        """Have the servers answer, and return what watches them. ``clients`` are their arguments, by model."""
        models = []
        starts = {name: prepare_restarts(self.config, placement, engines) for name, engines in self.engines.items()}
        for model, group in self._engines_by_model().items():
            name, addresses = scorer_group(model), list(clients[model]["addresses"])
            start = partial(self._start_again, starts[name], model, addresses)
            in_turn = name in self.list_sleeping_groups()
            restart_policy = make_restart_policy(self.config, placement, self.engines[name], in_turn, start)
            limit = _settings(self.config, name).request_timeout_s
            models.append(ScorerReplicas(model, group, addresses, limit, restart_policy))
        return ScorerWatch(models)

    def _start_again(self, start: StartWorker, model: str, addresses: list[str], member: int) -> Group:
        """Start a replica again, at its address, where its clients look for it, unless its node has left.

        Then it gets another address, among ``addresses`` as well.
        """
        name = scorer_group(model)
        models = self._models(name)
        engine, port = models.index(model) + member * len(models), int(addresses[member].rpartition(":")[2])
        worker, cache_bytes = start(engine)
        report, limit = worker.reports[0], self.config.cluster.start_timeout_s
        moved = report.node_id != self.groups[name].reports[engine].node_id
        settings, spec = self._worker_arguments(name, engine, report)
        spec = replace(spec, port=0 if moved else port, cache_bytes=cache_bytes)
        building = worker.submit_build(WORKER, [(settings, spec)], environment=self._environment(name))
        gather([building], limit)
        if moved:
            (addresses[member],) = worker.control("address", timeout_s=limit)
        return worker

    def list_sleeping_groups(self) -> list[str]:
        """Return groups that sleep while the actor works."""
        offload = self.config.cluster.offload is True
        return [name for name in self.groups if offload and name in self.config.groups_on_actor_gpus()]

    def sleep(self) -> None:
        """Have the engines on the actor's GPUs free these."""
        self._call_sleeping("server.sleep", "going to sleep")

    def wake(self) -> None:
        """Have them be as before."""
        self._call_sleeping("server.wake", "waking up")

    def _call_sleeping(self, method: str, activity: str) -> None:
        limit = self.config.weights.timeout_s
        for name in self.list_sleeping_groups():
            # One that died is missed where it is to score.
            self.groups[name].control(method, limit, timeout_s=limit + SLACK_S, activity=activity, keep_deaths=True)

    def _models(self, name: str) -> list[str]:
        """Return which of ``inputs.scorers`` the engines of a group serve, dealt out in turn."""
        return sorted(model for model in self.inputs.scorers if scorer_group(model) == name)

    def _tokenizer(self, name: str) -> str:
        student_hash = self.inputs.tokenizer_hash
        return tokenizer_hash(self.inputs.scorers[name]) if _settings(self.config, name).rates else student_hash

    def _engines_by_model(self) -> dict[str, Group]:
        """Return the engines of every model."""
        return {
            model: group.select(range(place, len(group), len(self._models(name))))
            for name, group in self.groups.items()
            for place, model in enumerate(self._models(name))
        }

    def client_arguments(self, n_clients: int) -> dict[str, dict[str, Any]]:
        """Return, by model, arguments of each of ``n_clients`` clients (:class:`gkd.scoring.client.ScoringClient`)."""
        limit = self.config.cluster.start_timeout_s
        addresses = {
            model: group.control("address", timeout_s=limit) for model, group in self._engines_by_model().items()
        }
        if self.config.algorithm.needs_teacher and "teacher" not in self.groups:
            addresses["teacher"] = external_addresses(self.config.teacher)
        return {model: self._arguments(model, hosts, n_clients) for model, hosts in addresses.items()}

    def _top_k(self, name: str) -> int:
        """Return the largest K that requests to a group have."""
        vocabulary = self.inputs.model.vocabulary
        if name != "teacher":
            return 0
        return max(required_top_k(self.config, vocabulary), top_k_for_validation(self.config, vocabulary))

    def _arguments(self, model: str, addresses: list[str], n_clients: int) -> dict[str, Any]:
        name = scorer_group(model)
        settings = _settings(self.config, name)
        rates = settings.rates
        vocabulary = self.inputs.teacher_vocabulary if name == "teacher" else self.inputs.model.vocabulary
        return {
            "addresses": addresses,
            "tokenizer_hash": self._tokenizer(name),
            "top_k": self._top_k(name),
            "vocabulary": None if rates else vocabulary,
            "max_length": None if rates else self.inputs.max_length,
            "key": self.key,
            "n_clients": n_clients,
            "request_timeout_s": settings.request_timeout_s,
            "max_attempts": settings.max_attempts,
            "heartbeat_s": settings.heartbeat_s,
            "scorer": model,
        }


def _settings(config: Config, name: str) -> Scorer | RewardModel:
    settings: Scorer | RewardModel = getattr(config, name)  # their sections have the groups' names
    return settings


def _key(config: Config) -> Key:
    """Return the user's key, which an external teacher has as well; without one, a key of this run's own."""
    teacher = config.teacher
    if config.algorithm.needs_teacher and teacher.server_ip is not None:
        return external_key(teacher)
    return Key.generate() if teacher.key_file is None else Key.load(key_path(teacher, []))

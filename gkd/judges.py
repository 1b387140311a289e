"""The groups that score samples with a model, teacher and reference: started alike, asked alike."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import ray

from gkd.algorithms.top_k import top_k_for_validation, top_k_wanted
from gkd.cluster.group import Group, Pending
from gkd.config import Config, Scorer
from gkd.inputs import Inputs
from gkd.teacher.address import Key, external_addresses
from gkd.vllm_engine import environment


@dataclass(frozen=True, slots=True)
class Judges:
    """Leaders of the engines of every group that scores, by name, and the key their sockets need."""

    config: Config
    inputs: Inputs
    groups: dict[str, Group] = field(default_factory=dict)
    key: Key | None = None

    @staticmethod
    def of(config: Config, inputs: Inputs, groups: Mapping[str, Group], rollout: Group) -> Judges:
        """The scoring groups among ``groups``. Raises ConfigError where the user's key cannot be read."""
        limit = config.cluster.start_timeout_s
        found = {
            name: groups[name].engines(_settings(config, name).tensor_parallel_size, limit)
            for name in ("teacher", "reference")
            if name in groups
        }
        return Judges(config, inputs, found, _key(config, rollout, found))

    def build(self) -> list[Pending]:
        """Start loading their models."""
        return [self._build(name, group) for name, group in self.groups.items()]

    def _build(self, name: str, group: Group) -> Pending:
        settings, model = _settings(self.config, name), self.inputs.judges[name]
        # A server of this run's own takes exactly the sequences this run has; less cache is set aside for them.
        longest = settings.max_model_len or self.inputs.max_length
        settings = settings.model_copy(update={"max_model_len": longest})
        # Without a key everything is on this machine; with one, each server listens where the others can reach it.
        args = [
            (
                settings,
                self.config.model.dtype_on(report.device),
                model,
                self.inputs.tokenizer_hash,
                report.device,
                report.ip if self.key else "127.0.0.1",
                self.key,
            )
            for report in group.reports
        ]
        threads = environment(group.reports[0].device, self.config.cluster.cpu_threads)
        return group.submit_build("gkd.teacher.worker:TeacherWorker", args, environment=threads)

    def serve(self) -> dict[str, Pending]:
        """Have the servers answer; the calls end only when one fails."""
        return {name: group.submit("serve", what="serving") for name, group in self.groups.items()}

    def asking(self, n_clients: int) -> dict[str, dict[str, Any]]:
        """Arguments of the clients of each, :class:`gkd.teacher.client.TeacherClient`, of which ``n_clients`` ask."""
        limit = self.config.cluster.start_timeout_s
        addresses = {name: group.control("address", timeout_s=limit) for name, group in self.groups.items()}
        if self.config.algorithm.needs_teacher and "teacher" not in addresses:
            addresses["teacher"] = external_addresses(self.config.teacher)
        return {name: self._arguments(name, found, n_clients) for name, found in addresses.items()}

    def _arguments(self, name: str, addresses: list[str], n_clients: int) -> dict[str, Any]:
        settings, vocabulary = _settings(self.config, name), self.inputs.model.vocabulary
        top_k = 0
        if name == "teacher":
            top_k = max(top_k_wanted(self.config, vocabulary), top_k_for_validation(self.config, vocabulary))
        return {
            "addresses": addresses,
            "tokenizer_hash": self.inputs.tokenizer_hash,
            "top_k": top_k,
            "vocabulary": vocabulary,
            "max_length": self.inputs.max_length,
            "key": self.key,
            "n_clients": n_clients,
            "request_timeout_s": settings.request_timeout_s,
            "max_attempts": settings.max_attempts,
            "heartbeat_s": settings.heartbeat_s,
        }


def _settings(config: Config, name: str) -> Scorer:
    return config.teacher if name == "teacher" else config.reference


def _key(config: Config, rollout: Group, judges: Mapping[str, Group]) -> Key | None:
    """The user's key; without one, one of this run's own where its servers and clients are on several machines."""
    if config.teacher.key_file is not None:
        return Key.load(config.teacher.key_file)
    addresses = {report.ip for group in (rollout, *judges.values()) for report in group.reports}
    addresses.add(ray.util.get_node_ip_address())
    return Key.generate() if judges and len(addresses) > 1 else None

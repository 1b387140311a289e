"""Evaluation: what is asked, by which strategies, and on how many GPUs."""

from __future__ import annotations

import inspect
from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from gkd.config.endpoint import OpenAIEndpoint
from gkd.config.eval_set import EvalSet
from gkd.config.open import OpenSections
from gkd.config.registry import EntryNames, Registry

STRATEGIES = Registry(
    "evaluate.strategies",
    {
        "plain": "gkd.evaluation.strategies:plain",
        "adaptive": "gkd.evaluation.retrieval:AdaptiveRetrieval",
        "fixed_k": "gkd.evaluation.retrieval:FixedRetrieval",
        "self_consistency": "gkd.evaluation.self_consistency:SelfConsistency",
    },
)
DEFAULT_STRATEGY = "plain"
"""Generates once and takes the answer; results are named by the model alone."""


class Endpoint(OpenAIEndpoint):
    """A model that is evaluated behind an endpoint."""

    concurrency: int = Field(16, ge=1, le=4096, description="questions under way at the same time")


class Evaluate(OpenSections):
    """Evaluation of models: the sets, the strategies, and the place of the results."""

    registry: ClassVar[Registry] = STRATEGIES
    selects: ClassVar[str] = "strategies"

    sets: dict[str, EvalSet] = Field({}, description="sets of questions, by name")
    endpoints: dict[str, Endpoint] = Field(
        {}, description="models behind OpenAI-compatible endpoints, by name, beside those of models.NAME"
    )
    output_dir: str = Field(
        "outputs/evaluate",
        description="where answers.jsonl and results/ are; answers that are there already are not asked for again",
    )
    mode: Literal["auto", "single", "data_parallel", "sharded"] = Field(
        "auto",
        description="GPUs that answer: auto: all, with the fewest for one engine that by the plan it fits on; "
        "single: one engine of rollout.tensor_parallel_size GPUs; data_parallel: as many such engines as there is room "
        "for; sharded: one engine over all GPUs of a node, or as many as vLLM divides the model over",
    )
    strategies: EntryNames = Field(
        [DEFAULT_STRATEGY],
        description=f"how a question is answered: {', '.join(STRATEGIES.names())}, or your own as package.module:name "
        "or FILE.py:name; each is measured on the same questions, and its settings are in evaluate.NAME",
    )

    @model_validator(mode="after")
    def _strategies_are_there(self) -> Evaluate:
        if not self.strategies or len(set(self.strategies)) != len(self.strategies):
            raise ValueError("strategies names none, or one twice")
        for name in self.strategies:
            strategy = STRATEGIES.load(name)
            if not callable(strategy):
                raise ValueError(f"strategies: {name} is no function and no class")
            if not _is_strategy(strategy):
                raise ValueError(
                    f"strategies: {name} is no strategy: async, and called with generate and row, it has to be"
                )
        if scheduled := [name for name, eval_set in self.sets.items() if eval_set.every is not None]:
            raise ValueError(f"sets.{scheduled[0]}.every is for data.val_sets, in training")
        if not self.output_dir.strip():
            raise ValueError("output_dir is empty: name a directory")
        return self


def _is_strategy(strategy: Any) -> bool:
    """Return whether a function, or an object of a class, is awaited when it is called with two arguments."""
    is_class = isinstance(strategy, type)
    call = strategy.__call__ if is_class else strategy
    try:
        inspect.signature(call).bind(*[None] * (2 + is_class))
    except (TypeError, ValueError):
        return False
    plain = inspect.unwrap(call, stop=inspect.iscoroutinefunction)  # a decorator need not be async
    return any(inspect.iscoroutinefunction(function) for function in (plain, type(plain).__call__))

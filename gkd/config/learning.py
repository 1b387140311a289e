"""Settings of what is optimised: divergences from a teacher, policy gradients from rewards, or both."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field, model_validator

from gkd.config.base import Settings
from gkd.config.open import OpenSettings, find_changed_settings
from gkd.config.registry import EntryName, Registry
from gkd.config.sampling import MAX_TEMPERATURE, MIN_TEMPERATURE

Aggregation = Literal["token_mean", "sequence_mean", "constant"]
RatioLevel = Literal["token", "sequence"]
Estimator = Literal["k1", "k2", "k3"]

ALGORITHMS = Registry(
    "algorithm.name",
    {
        "on_policy_distill": "gkd.algorithms.compositions:ON_POLICY_DISTILL",
        "grpo": "gkd.algorithms.compositions:GRPO",
        "gspo": "gkd.algorithms.compositions:GSPO",
        "sft": "gkd.algorithms.compositions:SFT",
    },
    "gkd.algorithms.compositions:Composition",
)
DIVERGENCES = Registry(
    "algorithm.loss.name",
    {
        "forward_kl": "gkd.losses.forward_kl:ForwardKL",
        "reverse_kl": "gkd.losses.reverse_kl:ReverseKL",
        "jsd": "gkd.losses.jsd:JSD",
        "sampled_reverse_kl": "gkd.losses.sampled_reverse_kl:SampledReverseKL",
    },
    "gkd.losses.divergence:Divergence",
)
ADVANTAGES = Registry(
    "algorithm.advantage.name",
    {"grpo": "gkd.algorithms.group_mean:GroupMean", "rloo": "gkd.algorithms.leave_one_out:LeaveOneOut"},
    "gkd.algorithms.advantages:AdvantageEstimator",
)
SURROGATES = Registry(
    "algorithm.policy.surrogate",
    {"clip": "gkd.losses.clip:Clip", "cispo": "gkd.losses.cispo:Cispo"},
    "gkd.losses.surrogate:Surrogate",
)


class Loss(OpenSettings):
    """Divergence between student and teacher at every response position."""

    registry: ClassVar[Registry] = DIVERGENCES

    name: EntryName = Field(
        "reverse_kl",
        description=f"which divergence: {', '.join(DIVERGENCES.entries)} (a policy gradient on the sampled tokens), or "
        "your own as package.module:Class or FILE.py:Class (prime-rl: trainer.loss.import_path)",
    )
    top_k: int | None = Field(
        None, ge=1, description="teacher's K most likely tokens; null: the full vocabulary (TRL: loss_top_k)"
    )
    tail: bool = Field(
        True, description="with top_k: the rest of both distributions in one bucket, or left out (TRL: loss_add_tail)"
    )
    temperature: float = Field(
        1.0, ge=MIN_TEMPERATURE, le=MAX_TEMPERATURE, description="temperature of both distributions inside the loss"
    )

    @property
    def is_policy_gradient(self) -> bool:
        """Whether it is an estimate from sampled tokens, which importance weights are for."""
        return bool(self.selected_class.is_policy_gradient)

    @property
    def compares_tokens_alone(self) -> bool:
        """Whether it needs no more of the teacher than the log-probabilities of the response tokens."""
        return bool(self.selected_class.teacher_logprobs == "token")


class Advantage(OpenSettings):
    """From rewards to advantages."""

    registry: ClassVar[Registry] = ADVANTAGES

    name: EntryName = Field(
        "grpo",
        description="the estimator: grpo is against the group's mean, rloo against the mean of the others; or your own "
        "as package.module:Class or FILE.py:Class (verl: adv_estimator)",
    )
    teacher_kl: float = Field(
        0.0, ge=0, description="weight of the teacher's sampled reverse KL, subtracted from every token's advantage"
    )


class Policy(OpenSettings):
    """The policy-gradient loss on rewards."""

    registry: ClassVar[Registry] = SURROGATES
    selects: ClassVar[str] = "surrogate"

    surrogate: EntryName = Field(
        "clip",
        description="PPO's clipped surrogate (clip), CISPO's weights (cispo), or your own as package.module:Class or "
        "FILE.py:Class (TRL: loss_type; verl: policy_loss.loss_mode)",
    )
    ratio: RatioLevel | None = Field(
        None,
        description="importance ratio of each token, or one of a response; null: sequence for algorithm.name=gspo, "
        "otherwise token (TRL: importance_sampling_level)",
    )
    sequence_mask_kl: float | None = Field(
        None,
        gt=0,
        description="leave out bad samples whose sampler is further off, nats a token; null: none (TRL: "
        "off_policy_mask_threshold)",
    )


class ReferenceKL(Settings):
    """A penalty that keeps the student near where it started, on the tokens that it sampled."""

    coef: float = Field(
        0.0,
        ge=0,
        description="weight in the loss; above 0 a reference group is started (TRL: beta; verl: kl_loss_coef)",
    )
    estimator: Estimator = Field(
        "k3",
        description="Schulman's estimate of the KL, times the importance ratio; k3 is GRPO's (verl: kl_loss_type; "
        "low_var_kl is k3)",
    )


class ImportanceSampling(Settings):
    """For the difference between the engine that samples and the trainer, on the same weights."""

    level: Literal["auto", "token", "sequence"] | None = Field(
        "auto",
        description="importance weights of tokens or of whole sequences; null: none; auto: of tokens where the two "
        "can differ: computing in bfloat16, weights in 4 bits, dropout, or schedule.max_staleness above 0 (TRL: "
        "vllm_importance_sampling_mode; verl: rollout_is)",
    )
    mask: bool = Field(
        False,
        description="leave out what is outside [1/cap, cap] instead of truncating at cap (TRL: "
        "vllm_importance_sampling_mode)",
    )
    cap: float = Field(
        2.0,
        gt=1,
        description="largest importance weight (TRL: vllm_importance_sampling_cap; verl: "
        "rollout_is_threshold; slime: tis_clip)",
    )


class DynamicSampling(Settings):
    """DAPO's: leave out groups whose rewards are all equal, and sample more until the batch is full."""

    max_rounds: int = Field(
        1,
        ge=1,
        description="rounds of sampling a step may take; 1: off, every group is kept (verl: "
        "filter_groups, max_num_gen_batches)",
    )


class Overlong(Settings):
    """Responses that the length limit ended."""

    action: Literal["keep", "mask", "penalty"] = Field(
        "keep",
        description="mask: no loss on them, and means over samples are over all (TRL: mask_truncated_completions); "
        "penalty: a reward falling to -1 over the last `buffer` tokens",
    )
    buffer: int = Field(
        64, ge=1, description="tokens before the limit over which the penalty grows (verl: overlong_buffer.len)"
    )


class Algorithm(Settings):
    """The objective of training."""

    registry: ClassVar[Registry] = ALGORITHMS
    selects: ClassVar[str] = "name"

    name: EntryName = Field(
        "on_policy_distill",
        description=f"the algorithm: {', '.join(ALGORITHMS.entries)}, or a composition of your own (TRL: "
        "completion_only_loss, for sft; verl: distillation.enabled)",
    )
    loss: Loss = Field(default_factory=Loss)
    reward_weight: float = Field(
        0.0,
        ge=0,
        description="on_policy_distill: weight of a GRPO loss on rewards beside the distillation loss (verl: "
        "distillation_loss_coef, of the latter)",
    )
    on_policy_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="GKD's lambda: share of prompts that the student answers itself; on the others it "
        "learns from the data's own answers, data.answer_key (TRL: lmbda)",
    )
    supervised_weight: float = Field(
        0.0,
        ge=0,
        description="weight of the cross-entropy on the data's own answers, beside the distillation loss, with "
        "on_policy_share below 1",
    )
    aggregation: Aggregation = Field(
        "token_mean",
        description="how tokens make a loss; constant divides by max_response_length, as Dr. GRPO (TRL: loss_type "
        "dapo, grpo, dr_grpo; verl: loss_agg_mode token-mean, seq-mean-token-mean, seq-mean-token-sum-norm)",
    )
    advantage: Advantage = Field(default_factory=Advantage)
    policy: Policy = Field(default_factory=Policy)
    kl: ReferenceKL = ReferenceKL()
    importance_sampling: ImportanceSampling = ImportanceSampling()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    overlong: Overlong = Overlong()

    @model_validator(mode="after")
    def _settings_are_of_what_is_learned_from(self) -> Algorithm:
        if self.reward_weight and not self.distils:
            raise ValueError(
                f"reward_weight={self.reward_weight:g}: {self.name} has no other loss to be weighed against"
            )
        if self.is_supervised:
            changes = find_changed_settings(self)
            shares = [f"{name}={changes[name]}" for name in ("on_policy_share", "supervised_weight") if name in changes]
            if unused := [*shares, *self._list_changed("loss", "kl")]:
                raise ValueError(
                    f"{unused[0]}: name={self.name} learns from the data's own answers alone, with the cross-entropy"
                )
        if not self.distils and (unused := self._list_changed("loss")):
            raise ValueError(f"{unused[0]} is about learning from a teacher, and name={self.name} does not")
        penalty = ["overlong.action=penalty"] if self.overlong.action == "penalty" else []
        sampling = [] if self.weighs_samples else ["importance_sampling"]
        unused = [*penalty, *self._list_changed("advantage", "policy", *sampling, "dynamic_sampling")]
        if unused and not self.policy_weight:
            raise ValueError(
                f"{unused[0]} is about learning from rewards, and name={self.name} does not: reward_weight=0"
            )
        return self

    def _list_changed(self, *sections: str) -> list[str]:
        """Return settings of sections below that are not as they are by default, with their values."""
        changed = {section: find_changed_settings(getattr(self, section)) for section in sections}
        return [f"{section}.{name}={value}" for section, values in changed.items() for name, value in values.items()]

    @property
    def composition(self) -> Any:
        """What is named: which losses the objective is made of."""
        return self.registry.load(self.name)

    @property
    def distils(self) -> bool:
        """Whether a divergence from the teacher is part of the loss."""
        return bool(self.composition.distils)

    @property
    def is_supervised(self) -> bool:
        """Whether the cross-entropy on the data's own answers is the loss, for which nothing is sampled."""
        return bool(self.composition.supervised)

    @property
    def learns_answers(self) -> bool:
        """Whether the data's own answers are learned from."""
        return self.is_supervised or self.on_policy_share < 1

    @property
    def cross_entropy_weight(self) -> float:
        """Weight of the cross-entropy on the data's own answers; 0 where there is none."""
        return 1.0 if self.is_supervised else self.supervised_weight

    @property
    def policy_weight(self) -> float:
        """Weight of the policy-gradient loss on rewards; 0 where there is none."""
        return self.reward_weight if self.distils else 0.0 if self.is_supervised else 1.0

    @property
    def ratio(self) -> RatioLevel:
        """Whether importance ratios of the policy-gradient loss are of tokens or of responses."""
        default: RatioLevel = self.composition.ratio
        return self.policy.ratio or default

    @property
    def needs_policy(self) -> bool:
        """Whether log-probabilities of the sampled tokens are part of the loss beside a divergence."""
        return self.policy_weight > 0 or self.needs_reference

    @property
    def weighs_samples(self) -> bool:
        """Whether a part of the loss is an average over sampled tokens, which importance weights are for."""
        return self.needs_policy or (self.distils and self.loss.is_policy_gradient)

    @property
    def couples_tokens(self) -> bool:
        """Whether what a token counts in the loss depends on other tokens of its response."""
        if self.weighs_samples and self.importance_sampling.level == "sequence":
            return True
        by_response = self.ratio == "sequence" or self.policy.sequence_mask_kl is not None
        return self.policy_weight > 0 and (by_response or not self.policy.selected_class.by_token)

    @property
    def needs_teacher(self) -> bool:
        """Whether samples are scored by a teacher."""
        return self.distils or self.advantage.teacher_kl > 0

    @property
    def needs_reference(self) -> bool:
        """Whether samples are scored by a reference model, for the penalty or a surrogate that refers to it."""
        return self.kl.coef > 0 or (self.policy_weight > 0 and bool(self.policy.selected_class.needs_reference))

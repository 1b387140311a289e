"""What is optimised: divergences from a teacher, policy gradients from rewards, or both."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, model_validator

from gkd.config.base import Settings

CLIP = {"on_policy_distill": (0.2, 0.2), "grpo": (0.2, 0.2), "gspo": (3e-4, 4e-4)}


class Loss(Settings):
    """Divergence between student and teacher at every response position."""

    name: Literal["forward_kl", "reverse_kl", "jsd", "sampled_reverse_kl"] = Field(
        "reverse_kl", description="which divergence; sampled_reverse_kl is a policy gradient on the sampled tokens"
    )
    beta: float = Field(0.5, ge=0, le=1, description="jsd's weight of the teacher: 0 is forward KL, 1 is reverse KL")
    top_k: int | None = Field(None, ge=1, description="teacher's K most likely tokens; null: the full vocabulary")
    tail: bool = Field(True, description="with top_k: the rest of both distributions in one bucket, or left out")
    temperature: float = Field(1.0, ge=1e-3, le=1e3, description="temperature of both distributions inside the loss")


class Advantage(Settings):
    """From rewards to advantages."""

    divide_by_std: bool = Field(True, description="divide by the group's standard deviation (GRPO; Dr. GRPO does not)")
    teacher_kl: float = Field(
        0.0, ge=0, description="weight of the teacher's sampled reverse KL, subtracted from every token's advantage"
    )


class Policy(Settings):
    """The policy-gradient surrogate."""

    surrogate: Literal["clip", "cispo"] = Field("clip", description="PPO's clipped surrogate, or CISPO's weights")
    clip_low: float | None = Field(
        None, ge=0, description="lower clip range; null: 0.2, for gspo 3e-4, for cispo none, ever"
    )
    clip_high: float | None = Field(None, ge=0, description="upper clip range; null: 0.2, for gspo 4e-4")
    sequence_mask_kl: float | None = Field(
        None, gt=0, description="leave out bad samples whose sampler is further off, nats a token; null: none"
    )

    @model_validator(mode="after")
    def _cispo_has_an_upper_bound_alone(self) -> Policy:
        if self.surrogate == "cispo" and self.clip_low is not None:
            raise ValueError(f"clip_low={self.clip_low:g}: cispo bounds its weights from above alone (clip_high)")
        return self


class ReferenceKL(Settings):
    """A penalty that keeps the student near where it started, on the tokens that it sampled."""

    coef: float = Field(0.0, ge=0, description="weight in the loss; above 0 a reference group is started")
    estimator: Literal["k1", "k2", "k3"] = Field(
        "k3", description="Schulman's estimate of the KL, times the importance ratio; k3 is GRPO's"
    )


class ImportanceSampling(Settings):
    """For the difference between the engine that samples and the trainer, on the same weights."""

    level: Literal["auto", "token", "sequence"] | None = Field(
        "auto",
        description="importance weights of tokens or of whole sequences; null: none; auto: of tokens where the two "
        "can differ: computing in bfloat16, weights in 4 bits, dropout",
    )
    mask: bool = Field(False, description="leave out what is outside [1/cap, cap] instead of truncating at cap")
    cap: float = Field(2.0, gt=1, description="largest importance weight")


class DynamicSampling(Settings):
    """DAPO's: leave out groups whose rewards are all equal, and sample more until the batch is full."""

    max_rounds: int = Field(1, ge=1, description="rounds of sampling a step may take; 1: off, every group is kept")


class Overlong(Settings):
    """Responses that the length limit ended."""

    action: Literal["keep", "mask", "penalty"] = Field(
        "keep",
        description="mask: no loss on them, and means over samples are over all; penalty: a reward falling to -1 over "
        "the last `buffer` tokens",
    )
    buffer: int = Field(64, ge=1, description="tokens before the limit over which the penalty grows")


class Algorithm(Settings):
    """What is optimised."""

    name: Literal["on_policy_distill", "grpo", "gspo"] = Field("on_policy_distill", description="the algorithm")
    loss: Loss = Loss()
    reward_weight: float = Field(
        0.0, ge=0, description="on_policy_distill: weight of a GRPO loss on rewards beside the distillation loss"
    )
    on_policy_share: float = Field(
        1.0,
        ge=0,
        le=1,
        description="GKD's lambda: share of prompts that the student answers itself; on the others it "
        "learns from the data's own answers (data.answer_key)",
    )
    supervised_weight: float = Field(
        0.0, ge=0, description="weight of the cross-entropy on the data's own answers, beside the distillation loss"
    )
    aggregation: Literal["token_mean", "sequence_mean", "constant"] = Field(
        "token_mean", description="how tokens make a loss; constant divides by max_response_length (Dr. GRPO)"
    )
    advantage: Advantage = Advantage()
    policy: Policy = Policy()
    kl: ReferenceKL = ReferenceKL()
    importance_sampling: ImportanceSampling = ImportanceSampling()
    dynamic_sampling: DynamicSampling = DynamicSampling()
    overlong: Overlong = Overlong()

    @model_validator(mode="after")
    def _rewards_are_learned_from_where_settings_say_how(self) -> Algorithm:
        if self.reward_weight and not self.distils:
            raise ValueError(
                f"reward_weight={self.reward_weight:g}: {self.name} has no other loss to be weighed against"
            )
        if self.policy_weight:
            return self
        told = [f"overlong.action={self.overlong.action}"] if self.overlong.action == "penalty" else []
        corrected = [] if self.weighs_samples else ["importance_sampling"]
        for section in ("advantage", "policy", *corrected, "dynamic_sampling"):
            settings = getattr(self, section)
            for name, field in type(settings).model_fields.items():
                if getattr(settings, name) not in (field.default, None):
                    told.append(f"{section}.{name}={getattr(settings, name)}")
        if told:
            raise ValueError(
                f"{told[0]} is about learning from rewards, and name={self.name} does not: reward_weight=0"
            )
        return self

    @property
    def distils(self) -> bool:
        """Whether a divergence from the teacher is part of the loss."""
        return self.name == "on_policy_distill"

    @property
    def policy_weight(self) -> float:
        """Weight of the policy-gradient loss on rewards; 0 where there is none."""
        return self.reward_weight if self.distils else 1.0

    @property
    def weighs_samples(self) -> bool:
        """Whether a part of the loss is an average over sampled tokens, which importance weights are for."""
        sampled = self.distils and self.loss.name == "sampled_reverse_kl"
        return self.policy_weight > 0 or self.kl.coef > 0 or sampled

    @property
    def needs_teacher(self) -> bool:
        """Whether samples are scored by a teacher."""
        return self.distils or self.advantage.teacher_kl > 0

    @property
    def clip(self) -> tuple[float, float]:
        """Lower and upper clip range."""
        low, high = CLIP[self.name]
        given = self.policy
        return low if given.clip_low is None else given.clip_low, high if given.clip_high is None else given.clip_high

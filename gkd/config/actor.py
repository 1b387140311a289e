"""How the student is trained: its optimizer, its memory, adapters."""

from __future__ import annotations

import math
import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from gkd.config.base import Settings
from gkd.config.open import find_changed_settings

Offloaded = Literal["optimizer", "weights"]

Beta = Annotated[float, Field(ge=0, lt=1)]

MICRO_BATCH_TOKENS = 8192
MOST_COPIED, LEAST_COPIED = 2_000_000_000, 200_000_000
"""Numbers of which a rank that is alone has copies to compute with, where there is room for them and where there is
none. With more of them a layer is so large that what FSDP2 does around it costs nothing beside it."""
PACK_SIZES = 4
"""Of packs up to the budget, where layers are compiled: a few compilations, and at most a quarter of the last pack of a
batch is padding."""


def has_room(tokens: int) -> bool:
    """Return whether micro-batches of so many tokens are larger than any GPU is to hold: memory is there for speed."""
    return tokens > MICRO_BATCH_TOKENS


def pack_size(n_tokens: int, budget: int) -> int:
    """Return the least multiple of a quarter of ``budget``, rounded up, that ``n_tokens`` fit in."""
    return math.ceil(max(1, math.ceil(n_tokens * PACK_SIZES / budget)) * budget / PACK_SIZES)


class Lora(Settings):
    """Low-rank adapters, trained instead of the model itself."""

    r: int | None = Field(
        None, ge=1, description="rank of the adapters (verl's lora_rank); null: the whole model is trained"
    )
    alpha: float | None = Field(None, gt=0, description="adapters count alpha / r; null: 2 r")
    dropout: float = Field(
        0.0, ge=0, lt=1, description="dropout before the adapters; the trainer then differs from the sampler"
    )
    target_modules: str | list[str] = Field(
        "all-linear",
        description="names of the layers that get one, or all-linear: every one but the head, layers for images, and "
        "those that peft takes for experts",
    )
    quantize: Literal["nf4"] | None = Field(
        None,
        description="nf4: the weights under the adapters in 4 bits, through bitsandbytes, not of GPT-2 and others with "
        "its Conv1D layers; null: as they are (TRL: load_in_4bit)",
    )

    @property
    def lora_alpha(self) -> float:
        """What adapters are multiplied with, times ``r``."""
        return 2 * (self.r or 0) if self.alpha is None else self.alpha

    @field_validator("target_modules")
    @classmethod
    def _targets_are_named(cls, targets: str | list[str]) -> str | list[str]:
        if not targets:
            raise ValueError("names no layer")
        if isinstance(targets, str):
            try:
                re.compile(targets)
            except re.error as error:
                raise ValueError(f"is neither all-linear, a list of names, nor a regular expression: {error}") from None
        return targets

    @model_validator(mode="after")
    def _without_a_rank_there_are_no_adapters(self) -> Lora:
        for name, value in find_changed_settings(self).items() if self.r is None else ():
            raise ValueError(f"{name}={value} is for adapters, and there are none: set r as well")
        return self


class Actor(Settings):
    """Training of the student."""

    lr: float | None = Field(
        None,
        gt=0,
        description="peak learning rate of AdamW; null: 2e-5 where a teacher or answers of the data are learned from, "
        "1e-6 where rewards alone are, ten times that with actor.lora.r (TRL: learning_rate; verl: optim.lr)",
    )
    warmup_steps: int = Field(
        0,
        ge=0,
        description="steps over which the learning rate rises linearly to its peak (TRL: warmup_ratio; verl: "
        "lr_warmup_steps_ratio)",
    )
    lr_decay: Literal["constant", "linear", "cosine"] = Field(
        "constant",
        description="shape of the learning rate after warm-up; linear and cosine reach a tenth of the peak one step "
        "after the last (TRL: lr_scheduler_type; verl: optim.warmup_style; slime: lr_decay_style)",
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay (OpenRLHF: l2)")
    betas: list[Beta] = Field(
        [0.9, 0.999],
        min_length=2,
        max_length=2,
        description="AdamW's betas (TRL: adam_beta1, adam_beta2; OpenRLHF: adam_betas)",
    )
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient (TRL's max_grad_norm)")
    max_tokens_per_micro_batch: int | None = Field(
        None,
        ge=1,
        description="tokens packed into one micro-batch on one rank (verl's ppo_max_token_len_per_gpu, in place of "
        "TRL's per_device_train_batch_size and gradient_accumulation_steps); null: 8,192, and 16,384 on GPUs that have "
        "room for it",
    )
    share_prompts: bool = Field(
        True,
        description="samples of one prompt in a micro-batch are computed with the prompt once, where sequences are "
        "packed (verl: use_prefix_grouper); false: each with its own",
    )
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    epochs: int = Field(1, ge=1, description="times a batch is learned from (TRL's num_iterations, verl's ppo_epochs)")
    mini_batch_size: int | None = Field(
        None,
        ge=1,
        description="samples of a batch that make one optimizer step (verl's ppo_mini_batch_size, in prompts there); "
        "null: all of them",
    )
    fsdp_size: int | None = Field(
        None,
        ge=1,
        description="GPUs that hold one copy of the student together; null: all. Fewer: several copies (HSDP), whose "
        "gradients are summed once an optimizer step, so that weights need not cross the network between nodes; 1: a "
        "copy on every GPU (verl: fsdp_size; prime-rl: dp_replicate, the number of copies)",
    )
    offload_optimizer: bool = Field(
        False,
        description="the optimizer's moments in the host's memory, from where they come to the GPU for each optimizer "
        "step (verl: optimizer_offload; OpenRLHF: adam_offload)",
    )
    offload_weights: bool = Field(
        False,
        description="weights, gradients and the optimizer in the host's memory, whose CPU does the optimizer's step; "
        "weights come to the GPU for every micro-batch, which is far slower than offload_optimizer alone (verl: "
        "offload_policy)",
    )
    lora: Lora = Lora()
    compile: Literal["auto"] | bool = Field(
        "auto",
        description="decoder layers compiled by torch.compile, in packs padded to a quarter of "
        "max_tokens_per_micro_batch; auto: on GPUs, dense models of 50 million parameters and more whose sequences are "
        "packed (TRL: torch_compile; verl: use_torch_compile)",
    )
    liger: bool = Field(
        False, description="norms, rotary embeddings and SwiGLU by Liger's fused kernels, on GPUs, instead of compiled "
        "layers; needs liger-kernel (TRL: use_liger_kernel; verl: use_liger)"
    )  # fmt: skip
    loss_chunk: int = Field(1024, ge=1, description="positions whose logits exist at the same time")

    @property
    def micro_batch_tokens(self) -> int:
        """Tokens of a micro-batch; where null was not decided, those that any GPU is to hold."""
        return self.max_tokens_per_micro_batch or MICRO_BATCH_TOKENS

    @property
    def has_room(self) -> bool:
        """Whether GPUs have memory to spare for speed."""
        return has_room(self.micro_batch_tokens)

    def most_copied(self, on_cpu: bool) -> int:
        """Return of how many numbers a rank that is alone has copies to compute with; FSDP2 holds a model with more."""
        return MOST_COPIED if on_cpu or self.has_room else LEAST_COPIED

    @property
    def offloaded(self) -> Offloaded | None:
        """What is in the host's memory: the optimizer's moments alone, or weights and gradients as well."""
        return "weights" if self.offload_weights else "optimizer" if self.offload_optimizer else None

    def copy_size(self, n_ranks: int) -> int:
        """Return how many of the actor's ranks hold one copy of the student together."""
        return min(self.fsdp_size or n_ranks, n_ranks)

    @model_validator(mode="after")
    def _layers_are_compiled_or_ligers(self) -> Actor:
        if self.liger and self.compile is True:
            raise ValueError("liger=true and compile=true: both fuse the same operations; set one of them")
        return self

"""The data that flows: a prompt becomes a sample, the teacher adds a target, a batch of both is one update."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question put to the student.

    ``token_ids`` [P] are the prompt's tokens with the chat template applied, ``text`` what the data file held,
    ``answer`` the reference answer where the data has one, ``answer_ids`` its tokens and the end token where it is
    learned from. ``messages``: what the chat template was given, where the data holds messages. ``teacher``: which of
    ``teacher.models`` judges its responses; ``teacher_ids`` [Q]: the prompt's tokens as that teacher is prompted, None
    where it sees the student's.
    """

    id: int
    token_ids: Int32
    text: str
    answer: str | None = None
    answer_ids: Int32 | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    teacher: str | None = None
    teacher_ids: Int32 | None = None

    @property
    def as_teacher_sees_it(self) -> Int32:
        """Token ids that are put before the teacher."""
        return self.token_ids if self.teacher_ids is None else self.teacher_ids


def teacher_of(prompt: Prompt) -> str:
    """Name of the teacher that judges a prompt's responses, among the models that judge."""
    return "teacher" if prompt.teacher is None else f"teacher:{prompt.teacher}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """How responses are drawn. ``temperature`` 0 is greedy."""

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0


@dataclass(frozen=True, slots=True)
class Request:
    """One response wanted: the ``index``-th of its prompt. Equal seeds give equal responses for equal weights.

    ``own_answer``: the data's answer is to be judged, and nothing sampled.
    """

    prompt: Prompt
    index: int
    seed: int
    sampling: Sampling
    own_answer: bool = False


@dataclass(frozen=True, slots=True)
class Judging:
    """Who judges a response once it is finished.

    ``top_k``: what the teacher is asked for, at ``temperature``; None asks it nothing. ``reference``: whether the
    reference model is asked, at the temperature of the sampling. ``rewards``: whether the reward functions are.
    """

    top_k: int | None = None
    temperature: float = 1.0
    reference: bool = False
    rewards: bool = False


@dataclass(frozen=True, slots=True)
class Job:
    """A request under way."""

    key: int
    request: Request
    judging: Judging


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished response.

    ``response_ids`` [R] includes the end token when ``finish_reason`` is "stop"; ``logprobs`` [R] are the sampler's,
    under the distribution that was sampled from, NaN where the response is the data's own; ``version`` is the weights'
    version that sampled it.
    """

    request: Request
    response_ids: Int32
    logprobs: Float32
    version: int
    finish_reason: Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Target:
    """The teacher's view of a response of R tokens.

    ``token_logprobs`` [R]: log-probability of each response token. ``ids`` [R, K] and ``logprobs`` [R, K]: the K most
    likely tokens at each response position, in falling order. K is 0 where only the tokens were asked for.
    ``tail_logprobs`` [R]: log-probability of all tokens but those K together, summed over the whole row at the teacher;
    None where there are no others, or K is 0. All are natural logarithms at ``temperature``.
    """

    token_logprobs: Float32
    ids: Int32
    logprobs: Float32
    temperature: float = 1.0
    tail_logprobs: Float32 | None = None

    def __post_init__(self) -> None:
        rows = len(self.token_logprobs)
        if self.ids.shape != self.logprobs.shape or self.ids.ndim != 2 or len(self.ids) != rows:
            raise ValueError(
                f"a target of {rows} positions has ids {self.ids.shape} and log-probabilities {self.logprobs.shape}"
            )
        if self.tail_logprobs is not None and self.tail_logprobs.shape != (rows,):
            raise ValueError(f"a target of {rows} positions has tails {self.tail_logprobs.shape}")


@dataclass(frozen=True, slots=True)
class Scored:
    """A sample with what the models said of it; what the actor trains on.

    ``target`` is the teacher's view, ``reference`` [R] the reference model's log-probabilities of the response tokens;
    None for a model that was not asked.
    """

    sample: Sample
    target: Target | None
    reference: Float32 | None = None


@dataclass(frozen=True, slots=True)
class Record:
    """What the driver sees of a finished sample: a few numbers and a reference to the rest.

    ``key`` names the job it answers; ``worker`` is the engine that sampled it. ``generated_s`` and ``scored_s`` are
    clock times (``time.time``) at which sampling and judging ended; ``rewards`` what each function gave, or why it
    gave nothing, ``reward_s`` how long it took where it gave something, seconds. The :class:`Scored` is at position
    ``slot`` of the list that the Ray object reference ``ref`` stands for.
    """

    key: int
    prompt_id: int
    index: int
    rewards: dict[str, float | str]
    n_prompt: int
    n_response: int
    finish_reason: str
    version: int
    worker: int
    generated_s: float
    scored_s: float
    slot: int
    ref: Any = None
    reward_s: dict[str, float] = field(default_factory=dict)

    @property
    def n_tokens(self) -> int:
        """Tokens of prompt and response."""
        return self.n_prompt + self.n_response


@dataclass(frozen=True, slots=True)
class Lesson:
    """What the actor learns from one sample: ``advantage`` of its tokens, and whether it is ``kept`` in the loss."""

    record: Record
    advantage: float = 0.0
    kept: bool = True


def seed_of(*place: int) -> int:
    """A 31-bit seed from a place in the run, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=4).digest()) >> 1

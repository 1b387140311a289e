"""The data that flows: Prompt -> Sample -> ScoredSample -> TrainingSample.

Shapes: P tokens of a prompt, L of a whole trajectory, N of them sampled, K candidates a position.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Bool = NDArray[np.bool_]
Int32 = NDArray[np.int32]
Float32 = NDArray[np.float32]

FinishReason = Literal["stop", "length"]

Spans: TypeAlias = tuple[tuple[int, int], ...]
"""Stretches of positions in a sequence, (start, stop) each, in order and apart."""


@dataclass(frozen=True, slots=True)
class Prompt:
    """A question put to the student.

    ``token_ids`` [P] are the prompt's tokens with the chat template applied, ``text`` what the data file held, or the
    template made of its messages, ``answer`` the reference answer where the data has one, ``other_answers`` those that
    are as right, ``answer_ids`` the answer's tokens and the end token where it is learned from. ``messages``: the chat
    template's input, where the data holds messages, and ``tools`` the JSON schemas that it is given beside them.
    ``teacher``: which of ``teacher.models`` scores its responses; ``teacher_ids`` [Q]: the prompt's tokens by that
    teacher's own template, None where they are the student's. ``file``: which of the files it is from. ``columns``: the
    whole row, where rewards look at it. ``question``: 16 hexadecimal digits of what its row asks and the right answers,
    before any template (of the columns that this takes) and without system messages: the same in every run and for
    every model.
    """

    id: int
    token_ids: Int32
    text: str
    answer: str | None = None
    answer_ids: Int32 | None = None
    messages: tuple[Mapping[str, Any], ...] | None = None
    teacher: str | None = None
    teacher_ids: Int32 | None = None
    other_answers: tuple[str, ...] = ()
    file: int = 0
    columns: Mapping[str, Any] = field(default_factory=dict)
    tools: tuple[Mapping[str, Any], ...] = ()
    question: str = ""

    @property
    def answers(self) -> tuple[str, ...]:
        """Every reference answer; empty where the data has none."""
        return () if self.answer is None else (self.answer, *self.other_answers)

    @property
    def teacher_prompt_ids(self) -> Int32:
        """Token ids of the prompt as the teacher's input has them."""
        return self.token_ids if self.teacher_ids is None else self.teacher_ids


def teacher_of(prompt: Prompt) -> str:
    """Name, among the scorers, of the teacher that scores a prompt's responses."""
    return "teacher" if prompt.teacher is None else f"teacher:{prompt.teacher}"


@dataclass(frozen=True, slots=True)
class Sampling:
    """The distribution that responses are drawn from. ``temperature`` 0 is greedy.

    ``top_p``, ``top_k``, ``min_p`` and ``presence_penalty`` as :mod:`gkd.losses.truncation` has them. ``stop``: texts
    that end a response, which then ends with the token that completes one.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0
    presence_penalty: float = 0.0
    stop: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Scoring:
    """The scorers that a sample goes to once it is finished.

    ``top_k``: how many of the teacher's most likely tokens come with each position, at ``temperature``; None: the
    teacher does not score it. ``reference``: whether the reference model scores it, at the temperature of the sampling.
    ``rewards``: whether the reward functions do, and the reward model where it is one of them. ``group_size``: how many
    samples of the prompt, with neighbouring keys, go on together: more than one where a reward rates them together.
    """

    top_k: int | None = None
    temperature: float = 1.0
    reference: bool = False
    rewards: bool = False
    group_size: int = 1


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """One sample wanted: the ``index``-th of its prompt. Equal seeds give equal samples for equal weights.

    ``from_dataset``: the data's answer is the sample, and nothing is drawn. ``key`` names the request among those of
    its run, those of a lower ``order`` are waited for first, and it is sampled from weights of ``version`` or newer;
    :class:`gkd.rollout.group.RolloutGroup` sets all three.
    """

    prompt: Prompt
    index: int
    seed: int
    sampling: Sampling
    scoring: Scoring = Scoring()
    from_dataset: bool = False
    key: int = 0
    order: float = 0
    version: int = 0


class VersionSpan(NamedTuple):
    """Positions ``start`` to ``stop`` of a trajectory were sampled from weights ``version``."""

    start: int
    stop: int
    version: int


@dataclass(frozen=True, slots=True)
class Sample:
    """A finished trajectory of L tokens, the prompt's included.

    ``token_ids`` [L]. ``sampled`` [L]: which of them the student wrote, or the data in its place
    (``request.from_dataset``); the first is never one. ``logprobs`` [L]: the sampler's log-probabilities under the
    distribution that was sampled from, NaN where nothing was. ``versions``: weight versions of all sampled stretches.
    ``finish_reason``: "stop" after an end token, which is then the last sampled one, "length" at the limit.

    Raises ValueError for arrays that do not belong together.
    """

    request: SampleRequest
    token_ids: Int32
    sampled: Bool
    logprobs: Float32
    versions: tuple[VersionSpan, ...]
    finish_reason: FinishReason

    def __post_init__(self) -> None:
        shape = self.token_ids.shape
        if len(shape) != 1 or self.sampled.shape != shape or self.logprobs.shape != shape:
            raise ValueError(
                f"a sample has token_ids {shape}, sampled {self.sampled.shape} and logprobs {self.logprobs.shape}: "
                "expected [L] three times"
            )
        if self.sampled[:1].any():
            raise ValueError("the first token of a sample has nothing before it that predicts it: it cannot be sampled")
        of_versions = [np.arange(start, stop) for start, stop, _ in self.versions]
        if not of_versions or not np.array_equal(np.concatenate(of_versions), np.flatnonzero(self.sampled)):
            spans = [(start, stop) for start, stop, _ in self.versions]
            raise ValueError(f"a sample has versions of positions {spans}, and {list(self.spans)} were sampled")

    @staticmethod
    def single_turn(
        request: SampleRequest, response_ids: Int32, logprobs: Float32, version: int, finish_reason: FinishReason
    ) -> Sample:
        """Return the prompt of ``request`` followed by one response; ``response_ids`` and ``logprobs`` are [N]."""
        prompt_ids = request.prompt.token_ids
        start, stop = len(prompt_ids), len(prompt_ids) + len(response_ids)
        sampled = np.zeros(stop, np.bool_)
        sampled[start:] = True
        unknown = np.full(start, np.nan, np.float32)
        return Sample(
            request,
            np.concatenate([prompt_ids, response_ids], dtype=np.int32),
            sampled,
            np.concatenate([unknown, logprobs], dtype=np.float32),
            (VersionSpan(start, stop, version),),
            finish_reason,
        )

    @property
    def spans(self) -> Spans:
        """Stretches of sampled positions."""
        edges = (np.flatnonzero(self.sampled[1:] != self.sampled[:-1]) + 1).tolist()  # the first token is never one
        if len(edges) % 2:
            edges.append(len(self.sampled))
        return tuple(zip(edges[::2], edges[1::2], strict=True))

    @property
    def sampled_ids(self) -> Int32:
        """Sampled tokens [N]."""
        return self.token_ids[self.sampled]

    @property
    def sampled_logprobs(self) -> Float32:
        """The sampler's log-probabilities of the sampled tokens [N]."""
        return self.logprobs[self.sampled]


@dataclass(frozen=True, slots=True)
class Target:
    """A model's log-probabilities at N scored positions of a sequence.

    ``token_logprobs`` [N]: log-probability of the token at each position. ``ids`` [N, K] and ``logprobs`` [N, K]: the K
    most likely tokens at each position, in falling order. K is 0 where only the tokens were scored. ``tail_logprobs``
    [N]: log-probability of all tokens but those K together, summed over the whole row by the scorer; None where there
    are no others, or K is 0. All are natural logarithms at ``temperature``.
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
class ScoredSample:
    """A sample with the scores of the models; what the actor trains on, and what lies in the object store.

    ``teacher``: the teacher's target at the N sampled positions. ``reference`` [N]: the reference model's
    log-probabilities of the sampled tokens. None for a model that did not score it.
    """

    sample: Sample
    teacher: Target | None = None
    reference: Float32 | None = None


@dataclass(frozen=True, slots=True)
class TrainingSample:
    """A scored sample on the driver: a few numbers and the place of its arrays.

    ``key`` is that of its request; ``n_tokens`` is L, ``n_sampled`` N; ``worker`` the engine that sampled it.
    ``generated_s`` and ``scored_s`` are clock times (``time.time``) at which sampling and scoring ended. ``rewards``:
    each function's reward, or why it gave none, without those that do not apply to it; ``reward_s``: how long each took
    that did not fail, seconds.
    ``kl_reference``: log p of the student less log p of the reference, summed over the sampled tokens; None where the
    reference did not score them. The
    :class:`ScoredSample` is at position ``slot`` of the list that the Ray object reference ``ref`` stands for.
    ``advantage`` is that of its sampled tokens; ``in_loss``: whether they count in the loss.
    """

    key: int
    prompt_id: int
    index: int
    n_tokens: int
    n_sampled: int
    finish_reason: FinishReason
    versions: tuple[VersionSpan, ...]
    worker: int
    generated_s: float
    scored_s: float
    rewards: Mapping[str, float | str] = field(default_factory=dict)
    reward_s: Mapping[str, float] = field(default_factory=dict)
    kl_reference: float | None = None
    ref: Any = None
    slot: int = 0
    advantage: float = 0.0
    in_loss: bool = True

    @staticmethod
    def from_sample(
        sample: Sample,
        worker: int,
        generated_s: float,
        rewards: Mapping[str, float | str] | None = None,
        reward_s: Mapping[str, float] | None = None,
        kl_reference: float | None = None,
    ) -> TrainingSample:
        """Describe ``sample``, whose scoring ends now."""
        return TrainingSample(
            key=sample.request.key,
            prompt_id=sample.request.prompt.id,
            index=sample.request.index,
            n_tokens=len(sample.token_ids),
            n_sampled=int(np.count_nonzero(sample.sampled)),
            finish_reason=sample.finish_reason,
            versions=sample.versions,
            worker=worker,
            generated_s=generated_s,
            scored_s=time.time(),
            rewards=rewards or {},
            reward_s=reward_s or {},
            kl_reference=kl_reference,
        )

    @property
    def version(self) -> int:
        """The oldest weight version that sampled any of its tokens."""
        return min(span.version for span in self.versions)

    @property
    def place(self) -> tuple[Any, int]:
        """Where the :class:`ScoredSample` is: a reference to a list, and the position in it."""
        return self.ref, self.slot


class GenerationNotice(NamedTuple):
    """The sample of request ``key`` is generated and is scored now: its slot in the engine is free."""

    key: int


def seed_of(*place: int) -> int:
    """Return a 31-bit seed from a place in the run, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(place).encode(), digest_size=4).digest()) >> 1

"""Whole steps of TRL's trainers and of the actor on the same samples: loss, gradient norm, weights after the step.

TRL's own code does all but the sampling: prompts, rewards, advantages, loss, clipping, AdamW. Here it is
:func:`gkd.algorithms.training_samples.with_advantages`, the token weights of the driver, and the real worker.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
import torch

from gkd.algorithms.aggregation import token_weights
from gkd.algorithms.training_samples import with_advantages
from gkd.config import Config, load
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample, Target, TrainingSample
from tests.actor import models
from tests.ray.actor.ranks import Ranks, call
from tests.samples import training_sample

pytest.importorskip("trl", reason="TRL is not installed (the extra trl)")

LIMIT, N, LR, DECAY, CLIP = 8, 4, 1e-3, 0.1, 0.5
PROMPTS = [[3, 4, 5], [6, 7], [8, 9, 10, 11]]


@dataclass(frozen=True)
class Step:
    """What a step did."""

    loss: float
    grad_norm: float


@dataclass(frozen=True)
class Drawn:
    """A response and what it is worth."""

    prompt: int
    ids: list[int]
    reward: float


def word(token: int) -> str:
    """All of one length: the end token is looked for within words."""
    return f"t{token:02}"


@pytest.fixture(scope="module")
def drawn() -> list[Drawn]:
    """N responses to each prompt; some end by themselves, others at the limit."""
    rng = np.random.default_rng(0)
    responses = []
    for prompt in range(len(PROMPTS)):
        for i in range(N):
            cut = i == 1
            ids = rng.integers(2, models.VOCAB, LIMIT if cut else int(rng.integers(1, LIMIT))).tolist()
            responses.append(Drawn(prompt, ids if cut else [*ids, 1], float(rng.integers(0, 4)) / 2))
    return responses


@pytest.fixture(scope="module")
def paths(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Student and teacher with one tokenizer."""
    from tokenizers import Tokenizer, pre_tokenizers
    from tokenizers import models as kinds
    from transformers import PreTrainedTokenizerFast

    words = Tokenizer(kinds.WordLevel({word(i): i for i in range(models.VOCAB)}, unk_token=word(0)))
    words.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    directories = {}
    for seed, name in enumerate(("student", "teacher")):
        directories[name] = tmp_path_factory.mktemp(name)
        models.make("qwen2 tied", seed).save_pretrained(directories[name])
        PreTrainedTokenizerFast(tokenizer_object=words, pad_token=word(0), eos_token=word(1)).save_pretrained(
            directories[name]
        )
    return directories


def scores(path: Path, drawn: Sequence[Drawn], temperature: float = 1.0) -> list[np.ndarray[Any, Any]]:
    """A model's log-probabilities [R, V] at the positions of every response, from transformers."""
    from transformers import AutoModelForCausalLM

    model, logprobs = AutoModelForCausalLM.from_pretrained(path), []
    for one in drawn:
        prompt = PROMPTS[one.prompt]
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *one.ids]])).logits[0, len(prompt) - 1 : -1]
        logprobs.append((logits / temperature).log_softmax(-1).numpy())
    return logprobs


def trl_steps(
    kind: str, arguments: dict[str, Any], paths: dict[str, Path], drawn: Sequence[Drawn], output: Path
) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """The steps of TRL's trainer, and the weights after them."""
    import datasets
    import trl
    from transformers import PreTrainedTokenizerFast

    losses: list[float] = []

    class Given(getattr(trl, f"{kind}Trainer")):
        """The trainer with responses that were drawn before."""

        def _generate_single_turn(self, prompt_ids: list[list[int]], *_: object, **__: object) -> Any:
            left = {i: [one.ids for one in drawn if one.prompt == i] for i in range(len(PROMPTS))}
            ids = [left[PROMPTS.index(list(prompt))].pop(0) for prompt in prompt_ids]
            return (ids, None) if kind == "GRPO" else ids

        def compute_loss(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(*args, **kwargs)
            losses.append(float(loss.detach()))
            return loss

    def worth(prompts: list[str], completion_ids: list[list[int]], **_: object) -> list[float]:
        known = {(texts[one.prompt], tuple(one.ids)): one.reward for one in drawn}
        return [known[p, tuple(ids)] for p, ids in zip(prompts, completion_ids, strict=True)]

    texts = [" ".join(map(word, prompt)) for prompt in PROMPTS]
    rows = [{"prompt": text} for text in texts]
    common = {
        "output_dir": str(output), "learning_rate": LR, "weight_decay": DECAY, "max_grad_norm": CLIP, "use_cpu": True,
        "lr_scheduler_type": "constant", "gradient_accumulation_steps": 1, "gradient_checkpointing": False,
        "bf16": False, "max_completion_length": LIMIT, "report_to": [], "save_strategy": "no", "logging_steps": 1,
        "disable_tqdm": True, "max_steps": 1,
    }  # fmt: skip
    if kind == "GRPO":
        common |= {
            "per_device_train_batch_size": len(drawn),
            "num_generations": N,
            "max_steps": arguments["num_iterations"],
        }
        trainer_arguments: dict[str, Any] = {"reward_funcs": worth}
    else:  # one response a prompt, so each prompt as often as it has responses
        rows = [row for row in rows for _ in range(N)]
        common |= {"per_device_train_batch_size": len(drawn)}
        trainer_arguments = {"teacher_model": str(paths["teacher"])}
    trainer = Given(
        model=str(paths["student"]),
        args=getattr(trl, f"{kind}Config")(**(common | arguments)),
        train_dataset=datasets.Dataset.from_list(rows),
        processing_class=PreTrainedTokenizerFast.from_pretrained(paths["student"]),
        **trainer_arguments,
    )
    trainer.train()
    norms = [row["grad_norm"] for row in trainer.state.log_history if "grad_norm" in row]
    steps = [Step(*both) for both in zip(losses, norms, strict=True)]
    return steps, {name: value.detach() for name, value in trainer.model.state_dict().items()}


def own_steps(
    algorithm: dict[str, Any],
    rank: Ranks,
    path: Path,
    samples: list[ScoredSample],
    drawn: Sequence[Drawn],
    n_updates: int,
) -> tuple[list[Step], dict[str, torch.Tensor]]:
    """The steps of the actor's worker on the same samples, from their rewards on."""
    config = load(
        {
            "algorithm": algorithm,
            "actor": {"lr": LR, "weight_decay": DECAY, "grad_clip": CLIP, "max_tokens_per_micro_batch": 40},
            "rollout": {"n": N, "max_response_length": LIMIT},
            "reward": {"functions": ["length"] if algorithm["name"] != "on_policy_distill" else []},
            "cluster": {"cpu_threads": 1},
        }
    )
    (worker,) = rank.become(str(path), config).workers
    ref = ray.put(samples)
    batch, _ = with_advantages(config, [on_driver(config, i, one, ref) for i, one in enumerate(drawn)])
    lengths = [sample.n_sampled for sample in batch]
    weights = token_weights(lengths, [sample.in_loss for sample in batch], config.algorithm.aggregation, LIMIT)
    steps = []
    if n_updates > 1:
        ray.get(call(worker, "trainer.compute_logprobs", batch, True, False), timeout=60)
    for step in range(1, n_updates + 1):
        metrics = ray.get(call(worker, "trainer.update", batch, weights, sum(lengths), step), timeout=60)
        steps.append(Step(metrics["actor/loss"], metrics["actor/grad_norm"]))
    return steps, rank.weights()


def on_driver(config: Config, i: int, one: Drawn, ref: Any) -> TrainingSample:
    rewards: dict[str, float | str] = dict.fromkeys(config.reward.functions, one.reward)
    ended = "stop" if one.ids[-1] == 1 else "length"
    n_prompt, n = len(PROMPTS[one.prompt]), len(one.ids)
    place = {"ref": ref, "slot": i}
    return training_sample(i, one.prompt, i % N, n_prompt=n_prompt, n=n, finish_reason=ended, rewards=rewards, **place)


def sample(i: int, one: Drawn, logprobs: np.ndarray[Any, Any]) -> Sample:
    prompt = Prompt(one.prompt, np.array(PROMPTS[one.prompt], np.int32), "")
    ids = np.array(one.ids, np.int32)
    own = logprobs[np.arange(len(ids)), ids]
    return Sample.single_turn(SampleRequest(prompt, i % N, i, Sampling(LIMIT)), ids, own, 0, "stop")


def compare(ours: Any, theirs: Any) -> None:
    """The same losses, norms and weights, as far as float32 goes.

    AdamW makes a whole step of a gradient that is nothing but rounding, so a few weights in a thousand may be apart.
    """
    (own, weights), (its, reference) = ours, theirs
    assert [step.loss for step in own] == pytest.approx([step.loss for step in its], rel=1e-4, abs=1e-6)
    assert [step.grad_norm for step in own] == pytest.approx([step.grad_norm for step in its], rel=1e-4)
    apart = torch.cat([(value - reference[name]).abs().flatten() for name, value in weights.items()])
    assert (apart > 0.01 * LR).float().mean() < 0.002


GRPO_CASES = {
    "grpo": (
        {"name": "grpo", "aggregation": "sequence_mean", "kl": {"coef": 0.1}},
        {"loss_type": "grpo", "beta": 0.1, "num_iterations": 2},
    ),
    "dapo": (
        {"name": "grpo", "aggregation": "token_mean", "policy": {"clip_high": 0.28}, "overlong": {"action": "mask"}},
        {"loss_type": "dapo", "epsilon_high": 0.28, "num_iterations": 2, "mask_truncated_completions": True},
    ),
    "dr_grpo": (
        {
            "name": "grpo", "aggregation": "constant", "advantage": {"divide_by_std": False},
            "overlong": {"action": "mask"},
        },
        {"loss_type": "dr_grpo", "scale_rewards": "none", "num_iterations": 1, "mask_truncated_completions": True},
    ),
    "gspo": (
        {"name": "gspo", "aggregation": "sequence_mean"},
        {
            "loss_type": "grpo", "importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4,
            "num_iterations": 2,
        },
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", GRPO_CASES)
def test_a_step_on_rewards_is_trls(
    case: str, processes: dict[int, Ranks], paths: dict[str, Path], drawn: list[Drawn], tmp_path: Path
) -> None:
    algorithm, arguments = GRPO_CASES[case]
    theirs = trl_steps("GRPO", arguments, paths, drawn, tmp_path)
    logprobs = scores(paths["student"], drawn)  # the student's at its start is the sampler and the reference
    samples = [sample(i, one, rows) for i, (one, rows) in enumerate(zip(drawn, logprobs, strict=True))]
    batch = [ScoredSample(s, None, s.sampled_logprobs if "kl" in algorithm else None) for s in samples]
    compare(own_steps(algorithm, processes[1], paths["student"], batch, drawn, arguments["num_iterations"]), theirs)


@pytest.mark.parametrize(
    ("name", "beta", "temperature"), [("forward_kl", 0.0, 1.0), ("reverse_kl", 1.0, 0.8), ("jsd", 0.3, 1.0)]
)
def test_a_step_of_distillation_is_trls(
    name: str, beta: float, temperature: float, processes: dict[int, Ranks], paths: dict[str, Path],
    drawn: list[Drawn], tmp_path: Path,
) -> None:  # fmt: skip
    theirs = trl_steps("Distillation", {"beta": beta, "temperature": temperature}, paths, drawn, tmp_path)
    own = scores(paths["student"], drawn)
    batch = []
    for i, (one, rows, teachers) in enumerate(
        zip(drawn, own, scores(paths["teacher"], drawn, temperature), strict=True)
    ):
        ids = np.broadcast_to(np.arange(models.VOCAB, dtype=np.int32), teachers.shape)
        chosen = teachers[np.arange(len(one.ids)), one.ids]
        batch.append(ScoredSample(sample(i, one, rows), Target(chosen, ids, teachers, temperature)))
    loss = {"name": name, "temperature": temperature} | ({"beta": beta} if name == "jsd" else {})
    compare(
        own_steps({"name": "on_policy_distill", "loss": loss}, processes[1], paths["student"], batch, drawn, 1), theirs
    )

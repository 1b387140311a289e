"""Two ranks train exactly as one does: the real workers, in Ray, over gloo."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import ray
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from gkd.actor.worker import ActorWorker
from gkd.config import Algorithm, Model
from gkd.errors import StudentNotWritten
from gkd.modeling.attention import IN_ROWS
from tests.actor import models
from tests.families import make as make_family
from tests.ray.actor.ranks import Ranks, call, config, put
from tests.ray.actor.test_state import read, save

STEPS = 2


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("student")
    models.make("qwen2 tied").save_pretrained(path)
    return str(path)


@contextmanager
def using(ranks: dict[int, Ranks], algorithm: dict[str, object]) -> Iterator[None]:
    """Have all workers optimise something else for a while."""

    def change(worker: object, settings: dict[str, object]) -> None:
        changed = worker.config.model_copy(update={"algorithm": Algorithm.model_validate(settings)})
        worker.config = worker.trainer.config = changed

    for settings in (algorithm, {}):
        ray.get([w.__ray_call__.remote(change, settings) for g in ranks.values() for w in g.workers], timeout=60)
        if settings is algorithm:
            yield


@pytest.fixture(scope="module")
def ranks(processes: dict[int, Ranks], model_path: str) -> dict[int, Ranks]:
    """One rank and two ranks of the same student."""
    return {world: group.become(model_path, config()) for world, group in processes.items()}


def test_two_ranks_give_the_metrics_gradient_and_weights_of_one(ranks: dict[int, Ranks]) -> None:
    before = ranks[1].weights()
    for step in range(1, STEPS + 1):
        batch = put([*models.scored(5, seed=step), *models.group(4, n_prompt=6, seed=step)])
        one, two = (ranks[world].run("update", batch, step) for world in (1, 2))
        for there_and_back in ("offload", "onload"):  # which changes nothing
            ray.get([call(w, f"state.{there_and_back}") for w in ranks[2].workers], timeout=60)
        assert one.keys() == two.keys()
        assert two == pytest.approx(one, rel=2e-4), step
        assert {"distill/loss", "distill/reverse_kl", "actor/grad_norm", "actor/lr", "mismatch/kl"} <= one.keys()
    single, double = ranks[1].weights(), ranks[2].weights()
    assert single.keys() == double.keys()
    for key, value in single.items():
        torch.testing.assert_close(double[key], value, rtol=1e-3, atol=1e-4)
    assert any(not torch.allclose(before[key], single[key], atol=1e-3) for key in single)  # it did train


@pytest.mark.parametrize(("family", "actor"), [("qwen3_5", {"gradient_checkpointing": True}), ("gpt_oss", {})])
def test_layers_that_are_given_rows_are_so_on_every_rank(
    family: str, actor: dict[str, object], processes: dict[int, Ranks], tmp_path: Path
) -> None:
    """Only the first rank tries what works, with the weights that it reads."""
    models.make(family).save_pretrained(tmp_path)
    one, two = (processes[world].become(str(tmp_path), config(world, **actor)) for world in (1, 2))
    read = [w.__ray_call__.remote(lambda it: it.trainer.student.lm.config._attn_implementation) for w in two.workers]
    assert ray.get(read, timeout=60) == [IN_ROWS] * 2
    for step in range(1, STEPS + 1):
        batch = put([*models.scored(5, seed=step), *models.group(4, n_prompt=6, seed=step)])
        single, double = (group.run("update", batch, step) for group in (one, two))
        assert double == pytest.approx(single, rel=5e-4), step


def test_gradients_that_one_copy_lacks_are_those_of_the_others(ranks: dict[int, Ranks], model_path: str) -> None:
    """As of an expert that no token of one copy went to; what no copy has stays without one."""

    def add_up(worker: ActorWorker) -> tuple[float, bool]:
        first, second, *_ = worker.trainer.student.parameters()
        first.grad, second.grad = torch.ones_like(first) if worker.rank == 0 else None, None
        worker.trainer.copies.sum_gradients([first, second])
        return float(first.grad.mean()), second.grad is None

    ranks[2].become(model_path, config(2, fsdp_size=1))
    assert ray.get([w.__ray_call__.remote(add_up) for w in ranks[2].workers], timeout=60) == [(1.0, True)] * 2
    ranks[2].become(model_path, config())


@pytest.mark.parametrize(
    ("section", "setting", "limit_s"),
    [("trainer", "update_timeout_s", 4000.0), ("trainer", "save_timeout_s", 4000.0), ("weights", "timeout_s", 8000.0)],
)
def test_ranks_wait_for_each_other_as_long_as_the_driver_waits_for_them(
    ranks: dict[int, Ranks], model_path: str, section: str, setting: str, limit_s: float
) -> None:
    """Also those of a copy, and while one of them writes a large model to a slow disk, or waits for a busy engine."""

    def read_limits(worker: ActorWorker) -> list[float]:
        copies = worker.trainer.copies
        backends = [group._get_backend(torch.device("cpu")) for group in (copies.mesh.get_group(), copies.group)]
        return [backend.options._timeout.total_seconds() for backend in backends]

    settings = config(2, fsdp_size=1)
    patient = settings.model_copy(update={section: getattr(settings, section).model_copy(update={setting: 4000.0})})
    ranks[2].become(model_path, patient)
    assert ray.get([w.__ray_call__.remote(read_limits) for w in ranks[2].workers], timeout=60) == [[limit_s] * 2] * 2
    ranks[2].become(model_path, config())


@pytest.mark.parametrize(("world", "size"), [(2, 1), (4, 2)])
def test_copies_of_the_student_train_as_one(
    ranks: dict[int, Ranks], world: int, size: int, model_path: str, tmp_path: Path
) -> None:
    """Each on one rank, and each sharded over two: the same step, and weights that stay equal to the last bit.

    One copy alone is in the checkpoint, from which one rank goes on.
    """
    several = ranks[world] if world in ranks else Ranks(world)
    settings = config(world, fsdp_size=size)
    try:
        several.become(model_path, settings)
        ranks[1].become(model_path, config())
        for step in range(1, STEPS + 1):
            batch = put(models.scored(9, seed=step))
            one, all_of_them = (group.run("update", batch, step) for group in (ranks[1], several))
            assert all_of_them == pytest.approx(one, rel=2e-4), step
        single, merged = ranks[1].weights(), several.weights()
        for key, value in single.items():
            torch.testing.assert_close(merged[key], value, rtol=1e-3, atol=1e-4)
        parts = ray.get([call(w, "state.keep") for w in several.workers], timeout=60)
        for rank in range(size, world):
            for mine, other in zip(parts[rank].part, parts[rank % size].part, strict=True):
                assert all(np.array_equal(value, other[name]) for name, value in mine.items())
        saved = save(several, tmp_path, settings, Path(model_path))
        sizes = [file.stat().st_size for file in saved.rank_files]
        assert min(sizes[:size]) > 10 * max(sizes[size:])
        read(several.become(model_path, settings), saved)
        read(ranks[1].become(model_path, config()), saved)
        batch = put(models.scored(5, seed=7))
        again, one = (group.run("update", batch, STEPS + 1) for group in (several, ranks[1]))
        assert again == pytest.approx(one, rel=2e-4)
    finally:
        if several is not ranks.get(world):
            several.end()
        else:
            several.become(model_path, config())
        ranks[1].become(model_path, config())


def test_compiled_layers_train_as_they_do_without(ranks: dict[int, Ranks], model_path: str) -> None:
    """By inductor, over two ranks that share what is compiled."""
    settings = {"max_tokens_per_micro_batch": 400, "gradient_checkpointing": True}
    made = {1: config(**settings), 2: config(**settings, compile=True)}
    for world, its_config in made.items():
        ranks[world].become(model_path, its_config)
    for step in (1, 2):
        batch = put(models.scored(4, 7, seed=step))
        one, two = (ranks[world].run("update", batch, step) for world in (1, 2))
        assert two == pytest.approx(one, rel=2e-4), step
    single, double = ranks[1].weights(), ranks[2].weights()
    for key, value in single.items():
        torch.testing.assert_close(double[key], value, rtol=1e-3, atol=1e-4)

    def compiled(worker: ActorWorker) -> int:
        from torch._dynamo.utils import counters

        return int(counters["stats"]["unique_graphs"])

    graphs = ray.get([w.__ray_call__.remote(compiled) for w in ranks[2].workers], timeout=60)
    assert min(graphs) > 1
    for world in made:
        ranks[world].become(model_path, config())


@pytest.mark.parametrize(("name", "k"), [("jsd", 7), ("sampled_reverse_kl", 0)])
def test_a_rank_without_samples_takes_part(ranks: dict[int, Ranks], name: str, k: int) -> None:
    batch = put(models.scored(1, k, seed=5))
    with using(ranks, {"loss": {"name": name}}):
        one, two = (ranks[world].run("update", batch, 4) for world in (1, 2))
    assert two == pytest.approx(one, rel=1e-3)


@pytest.mark.parametrize("name", ["grpo", "gspo"])
def test_two_ranks_learn_from_rewards_as_one_does(ranks: dict[int, Ranks], name: str) -> None:
    """Two updates of one batch: the second one's ratios are against what the first one started from."""
    samples = models.scored(5, seed=6)
    batch = put([dataclasses.replace(s, teacher=None, reference=s.sample.sampled_logprobs) for s in samples])
    with using(ranks, {"name": name, "kl": {"coef": 0.1}, "policy": {"clip_low": 0.5, "clip_high": 0.5}}):
        for world in (1, 2):
            ranks[world].run("compute_logprobs", batch, True, False)
        first, again = ([ranks[world].run("update", batch, 5) for world in (1, 2)] for _ in range(2))
    for one, two in (first, again):
        assert two == pytest.approx(one, rel=2e-3, abs=1e-5)
        assert {"actor/policy_loss", "actor/kl_loss", "actor/clip_fraction", "mismatch/kl"} <= one.keys()
    # The sampler's disagreement is with the weights that the batch started from, so the second update's is the same.
    assert again[0]["mismatch/kl"] == pytest.approx(first[0]["mismatch/kl"], rel=1e-6)
    assert again[0]["actor/policy_loss"] != pytest.approx(first[0]["actor/policy_loss"], rel=1e-3)


def test_what_an_engine_computes_otherwise_is_corrected_by_itself(ranks: dict[int, Ranks]) -> None:
    """In bfloat16, where engine and trainer can differ; in float32 every weight is 1."""
    batch = put([dataclasses.replace(s, teacher=None) for s in models.scored(5, seed=6)])

    def compute_in(worker: object, dtype: str) -> None:
        worker.config = worker.trainer.config = worker.config.model_copy(update={"model": Model(dtype=dtype)})

    with using(ranks, {"name": "grpo"}):
        metrics = {}
        for dtype in ("bfloat16", "auto"):
            ray.get([w.__ray_call__.remote(compute_in, dtype) for w in ranks[1].workers], timeout=60)
            metrics[dtype] = ranks[1].run("update", batch, 5)
    assert metrics["auto"]["actor/importance_weight"] == pytest.approx(1.0, abs=1e-6)
    assert abs(metrics["bfloat16"]["actor/importance_weight"] - 1) > 0.01


def test_evaluate_changes_nothing(ranks: dict[int, Ranks]) -> None:
    batch = put(models.scored(6, seed=9))
    before = ranks[1].weights()
    first = ranks[1].run("evaluate", batch, Algorithm())
    again = ranks[1].run("evaluate", batch, Algorithm())
    assert first == again
    after = ranks[1].weights()
    assert all(torch.equal(before[key], after[key]) for key in before)


def test_saved_student_is_the_trained_one(ranks: dict[int, Ranks], model_path: str, tmp_path: Path) -> None:
    from tokenizers import Tokenizer
    from tokenizers import models as kinds
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = {f"t{i}": i for i in range(models.VOCAB)}
    PreTrainedTokenizerFast(tokenizer_object=Tokenizer(kinds.WordLevel(words, unk_token="t0"))).save_pretrained(
        model_path
    )
    ray.get([call(w, "state.save", str(tmp_path / "model")) for w in ranks[2].workers], timeout=60)
    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "model").state_dict()
    for name, value in ranks[2].weights().items():
        torch.testing.assert_close(saved[name], value, rtol=0, atol=0)


def test_ranks_go_on_after_a_student_that_could_not_be_written(ranks: dict[int, Ranks], tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first, second = (call(w, "state.save", str(tmp_path / "file" / "model")) for w in ranks[2].workers)
    with pytest.raises(ray.exceptions.RayTaskError) as raised:
        ray.get(first, timeout=60)
    assert isinstance(raised.value.cause, StudentNotWritten)
    ray.get(second, timeout=60)
    assert "actor/loss" in ranks[2].run("update", put(models.scored(3, seed=4)), 7)


def test_targets_that_are_no_distribution_are_refused(ranks: dict[int, Ranks]) -> None:
    batch = models.scored(2, seed=3)
    batch[0].teacher.logprobs[:] = float("nan")
    with pytest.raises(ray.exceptions.RayTaskError, match=r"teacher's probability .* is nan"):
        ranks[1].run("update", put(batch), 7)


def test_a_gradient_that_is_not_finite_changes_nothing(ranks: dict[int, Ranks]) -> None:
    """It says which updates of its step were made before it."""

    def fill(value: float) -> None:
        def change(worker: object) -> None:
            with torch.no_grad():
                worker.trainer.student.lm.model.norm.weight.fill_(value)

        ray.get(ranks[1].workers[0].__ray_call__.remote(change), timeout=60)

    batch = models.scored(2, seed=3)
    for message in ("nothing was updated", "1 of its mini-batches were learned from before"):
        fill(float("nan"))
        before = ranks[1].weights()
        with pytest.raises(ray.exceptions.RayTaskError, match=rf"step 7 .*not finite .*; {message}"):
            ranks[1].run("update", put(batch), 7)
        after = ranks[1].weights()
        assert all(torch.equal(before[key], after[key]) for key in before if "model.norm" not in key)
        fill(1.0)
        ranks[1].run("update", put(batch), 7, False)


def test_only_rank_0_holds_the_whole_model_while_it_is_read(processes: dict[int, Ranks], tmp_path: Path) -> None:
    """The other rank keeps its half, and has one tensor more at a time."""
    shape = {**models.SHAPE, "hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 16}
    lm = LlamaForCausalLM(LlamaConfig(**shape))
    whole_mb = sum(p.nbytes for p in lm.parameters()) >> 20
    lm.save_pretrained(tmp_path)

    def memory_mb(which: str) -> int:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) >> 10 for line in lines if line.startswith(which))

    def read(worker: ActorWorker, path: str) -> tuple[int, float]:
        Path("/proc/self/clear_refs").write_text("5")  # the peak is of now
        before = memory_mb("VmRSS")
        worker.model_path = path
        worker.load()
        return memory_mb("VmHWM") - before, float(
            sum(p.to_local().double().sum() for p in worker.trainer.student.parameters())
        )

    calls = [w.__ray_call__.remote(read, str(tmp_path)) for w in processes[2].workers]
    (grown, there), (grown_other, here) = ray.get(calls, timeout=120)
    assert whole_mb > 150
    assert grown > 0.8 * whole_mb > 0.7 * whole_mb > grown_other
    assert there + here == pytest.approx(float(sum(p.detach().double().sum() for p in lm.parameters())), rel=1e-6)


def test_what_a_model_keeps_beside_parameters_is_on_every_rank(processes: dict[int, Ranks], tmp_path: Path) -> None:
    """A bias of the router is a buffer that files have; frequencies are one that they lack."""
    model = make_family("deepseek_v3", 0)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "correction" in name:
                buffer.normal_()
    model.save_pretrained(tmp_path)
    exact = dict(model.state_dict())
    assert any("correction" in name for name in exact)
    two = processes[2].become(str(tmp_path), config())
    sent = two.weights()
    assert all(torch.equal(sent[name], exact[name]) for name in exact if "correction" in name)

    def buffers(worker: ActorWorker) -> dict[str, torch.Tensor]:
        return {name: value.clone() for name, value in worker.trainer.student.lm.named_buffers()}

    there, here = ray.get([w.__ray_call__.remote(buffers) for w in two.workers], timeout=60)
    expected = dict(model.named_buffers())
    assert there.keys() == here.keys() == expected.keys()
    assert all(torch.equal(there[name], value) and torch.equal(here[name], value) for name, value in expected.items())

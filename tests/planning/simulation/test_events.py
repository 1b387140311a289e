"""Simulated steps against sums by hand, and of layouts: what is coarse gives what is not."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.config.loading import dump_yaml
from gkd.planning.advice.splits import best_splits
from gkd.planning.measured.factors import factors_of
from gkd.planning.memory.colocation import all_memory
from gkd.planning.simulation import steps
from gkd.planning.simulation.events import simulate
from gkd.planning.simulation.run import DriverTimes, Pace, SamplingGroup, ScoringGroup, SimulatedRun, TrainingGroup
from gkd.planning.simulation.stages import Factors
from gkd.planning.simulation.steps import response_lengths, run_of, simulate_layout, streams
from tests.planning.layouts import layout_of

# Four samples of 10 tokens, one a second, two at a time: 20 s. The teacher takes 3 s each, the update 1 s each.
RUN = SimulatedRun(
    n_prompts=4,
    n=1,
    prompt=0.0,
    mean_tokens=10.0,
    lengths=lambda step: [10.0] * 4,
    sampling=SamplingGroup(1, 4, 2, lambda n: 1.0),
    scoring={"teacher": ScoringGroup(1, 3.0)},
    updating=TrainingGroup(accumulate_s=4.0, apply_s=0.5, sync_s=0.25),
)
STREAMED = replace(RUN, updating=replace(RUN.updating, chunk_tokens=10.0))


def test_the_update_waits_for_the_last_scored_sample() -> None:
    step = simulate(RUN)
    assert step.seconds == pytest.approx(20 + 3 + 3 + 4 + 0.5 + 0.25)  # the second pair is scored after 20 s
    assert step.generate == pytest.approx(20)
    assert step.busy == pytest.approx({"actor": 4.75, "rollout": 20.25, "teacher": 12.0})
    assert step.bound == "rollout"


def test_a_step_in_which_engines_had_nothing_to_do_is_simulated() -> None:
    """What is computed anew in flight takes time even where tokens take none."""
    static = SamplingGroup(1, 4, 2, lambda n: 1.0, recompute_s=0.1, continuous=False)
    run = replace(RUN, sampling=static, lengths=lambda step: [5.0, 20.0, 10.0, 7.0], max_staleness=2, in_flight=True)
    assert simulate(replace(run, paces=(Pace(0.0, 0.0, 0.0), Pace()))).seconds > 0


def test_streaming_leaves_the_last_chunks_and_the_optimizer_step() -> None:
    """The last but one is closed by the sample that does not fit into it any more, which is the last one."""
    assert simulate(STREAMED).seconds == pytest.approx(20 + 3 + 3 + 2 + 0.5 + 0.25)


def test_the_sample_that_is_trained_first_is_scored_first() -> None:
    """By hand: they come after 10 s in about the order 3, 2, 1, 0, and a scorer takes the first to come.

    Where it holds one sample it takes 0, 1 and 2 then, of which each begins as the one before it is scored, and the
    last two learn after 10 + 4 * 3 s. Where it holds them all 0 is scored last, and all four learn after that.
    """
    run = replace(STREAMED, sampling=SamplingGroup(1, 4, 4, lambda n: 1.0), lengths=lambda _: [10.03, 10.02, 10.01, 10])
    seconds = [simulate(replace(run, scoring={"teacher": ScoringGroup(1, 3.0, held=n)})).seconds for n in (1, 4)]
    assert seconds == pytest.approx([22 + 3 + 0.75, 22 + 4 + 0.75], abs=0.05)


def test_a_static_batch_ends_as_a_whole_before_the_next_begins() -> None:
    """By hand: the first pair takes the 20 s of its longer sample, the second one 10."""
    static = replace(RUN, lengths=lambda step: [5.0, 20.0, 10.0, 10.0], mean_tokens=45 / 4)
    static = replace(static, scoring={}, sampling=replace(RUN.sampling, continuous=False))
    assert simulate(static).generate == pytest.approx(20 + 10)
    together = replace(static, sampling=replace(static.sampling, continuous=True))
    assert simulate(together).generate == pytest.approx(25)  # 5, then 10 and 10 beside the 20


def test_samples_of_one_pass_are_scored_together() -> None:
    """Of four at a time the first finds the scorer idle, and the other three wait for it and for each other."""
    at_once = replace(STREAMED, sampling=SamplingGroup(1, 4, 4, lambda n: 1.0))
    by_one = simulate(replace(at_once, scoring={"teacher": ScoringGroup(1, 3.0)}))
    by_pass = simulate(replace(at_once, scoring={"teacher": ScoringGroup(1, 3.0, a_pass=3)}))
    assert by_one.busy["teacher"] == by_pass.busy["teacher"] == pytest.approx(12)
    assert by_one.scored == by_pass.scored == pytest.approx(10 + 12)
    # A chunk is closed by the sample after it: the last two are left, or the last three, of which none came before.
    assert by_one.seconds == pytest.approx(10 + 12 + 2 + 0.5 + 0.25)
    assert by_pass.seconds == pytest.approx(10 + 12 + 4 + 0.5 + 0.25)


def test_groups_slow_each_other_down_where_their_device_has_no_room_for_both() -> None:
    shared = replace(RUN, hosts={"rollout": "actor", "teacher": "actor"})
    assert simulate(replace(shared, at_once=2)).seconds == pytest.approx(simulate(RUN).seconds)
    assert simulate(shared).seconds > simulate(RUN).seconds + 1


def test_the_actor_waits_longer_for_engines_whose_steps_differ() -> None:
    """With as much work on both sides, each waits for the other whenever that one is late."""
    ahead = replace(RUN, max_staleness=1, scoring={}, updating=replace(RUN.updating, accumulate_s=19.5))
    even = simulate(ahead, steps=8)
    paces = tuple(Pace(sample=sample, update=2 - sample) for sample in (0.5, 1.5))
    uneven = simulate(replace(ahead, paces=paces), steps=8)
    assert even.seconds == pytest.approx(20.25)
    assert uneven.seconds == pytest.approx(30.25)
    assert uneven.busy == pytest.approx(even.busy)


def test_chunks_go_in_the_order_of_the_batch() -> None:
    """The first sample is the last to finish, at 12 s: with the others' chunks waiting for it nothing is hidden."""
    late = replace(STREAMED, lengths=lambda step: [12.0, 1.0, 1.0, 1.0], sampling=SamplingGroup(1, 4, 4, lambda n: 1.0),
                   mean_tokens=3.75)  # fmt: skip
    assert simulate(replace(late, scoring={})).seconds == pytest.approx(12 + 4 + 0.5 + 0.25)
    early = replace(late, lengths=lambda step: [1.0, 1.0, 1.0, 12.0], scoring={})
    early = replace(early, updating=replace(early.updating, chunk_tokens=1.0))
    assert simulate(early).seconds == pytest.approx(12 + 4 * 13 / 15 + 0.5 + 0.25)


def test_a_group_goes_into_a_chunk_with_the_last_of_its_samples() -> None:
    """Of two groups of two the first is whole at 12 s, when all is there."""
    groups = replace(STREAMED, n_prompts=2, n=2, lengths=lambda step: [1.0, 12.0, 1.0, 1.0], scoring={},
                     mean_tokens=3.75, sampling=SamplingGroup(1, 4, 4, lambda n: 1.0))  # fmt: skip
    groups = replace(groups, updating=replace(groups.updating, unit=2, chunk_tokens=1.0))
    assert simulate(groups).seconds == pytest.approx(12 + 4 + 0.5 + 0.25)


def test_a_batch_that_comes_while_the_step_before_is_recorded_waits_for_that() -> None:
    """By hand: one is sampled every 20 s, in flight; an update of 4.5 s and a push of 0.25 begin when it is there."""
    run = replace(RUN, scoring={}, max_staleness=1, in_flight=True)
    assert simulate(run, steps=8).seconds == pytest.approx(20.25)
    recording = replace(run, driver=DriverTimes(record_s=18.0))
    assert simulate(recording, steps=8).seconds == pytest.approx(18 + 4.5 + 0.25)


def test_what_is_requested_and_has_not_begun_is_drained_as_well() -> None:
    """By hand: an update of 1 s ends before the next batch's 20 s begin, 3 s after the push of 0.25 s."""
    run = replace(RUN, scoring={}, max_staleness=1, driver=DriverTimes(start_s=3.0),
                  updating=TrainingGroup(0.5, 0.5, 0.25))  # fmt: skip
    assert simulate(run, steps=8).seconds == pytest.approx(3 + 20 + 0.25)


def test_what_comes_while_a_static_batch_is_sampled_waits_for_its_end() -> None:
    """By hand, one sample a step, the next one's ahead: steps 1 and 2 end at 14.75 and 19.5 s, and then 3 and 4 begin.

    Both take 10 s and the 0.25 s of the first push meanwhile. Where 4 begins at 19.5 s it ends with no push at 29.5 s,
    and step 4 at 29.75 + 4.75 s; where it begins as 3 ends, at 25 s, it ends at 35.25 s, and step 4 at 40 s.
    """
    run = SimulatedRun(1, 1, 0.0, 10.0, lambda step: [10.0], SamplingGroup(1, 2, 2, lambda n: 1.0), {},
                       TrainingGroup(4.0, 0.5, 0.25), max_staleness=1, in_flight=True)  # fmt: skip
    beside = simulate(run, steps=2, first=2).seconds
    alone = simulate(replace(run, sampling=replace(run.sampling, continuous=False)), steps=2, first=2).seconds
    assert (beside, alone) == pytest.approx(((34.5 - 19.5) / 2, (40 - 19.5) / 2))


def test_one_step_off_takes_the_longer_side_and_the_push() -> None:
    """By hand: the next batch is sampled within the update or the update within it, and both stop for the weights."""
    assert simulate(replace(RUN, max_staleness=1)).seconds == pytest.approx(20.25 + 3 + 3 - 3 - 3, abs=0.3)
    slow = replace(RUN, max_staleness=1, updating=replace(RUN.updating, accumulate_s=40.0))
    assert simulate(slow).seconds == pytest.approx(40 + 0.5 + 0.25)


def test_a_batch_is_drained_before_a_push_unless_weights_load_in_flight() -> None:
    """One straggler a batch: drained for, it is alone for 90 s; in flight the next batches are sampled beside it."""
    run = replace(
        RUN, lengths=lambda step: [10.0, 10.0, 10.0, 100.0], scoring={}, sampling=SamplingGroup(1, 8, 8, lambda n: 1.0)
    )
    drained = simulate(replace(run, max_staleness=4)).seconds
    in_flight = simulate(replace(run, max_staleness=4, in_flight=True)).seconds
    assert drained == pytest.approx(100.25, rel=0.01)
    assert in_flight < 0.6 * drained


def test_an_engine_gets_weights_once_it_is_drained_itself() -> None:
    """By hand, two engines of one place and a sample of 10 and one of 50 s a step."""
    run = replace(
        RUN, n_prompts=2, n=1, scoring={}, max_staleness=1, mean_tokens=31.0, prompt=1.0,
        lengths=lambda step: [10.0, 50.0], sampling=SamplingGroup(2, 1, 1, lambda n: 1.0),
        updating=TrainingGroup(accumulate_s=4.0, apply_s=1.0, sync_s=0.5),
    )  # fmt: skip
    together = simulate(replace(run, together=True), steps=20)
    assert together.seconds == pytest.approx(50 + 0.5)
    # In two steps each engine has a short one, weights, the long one of the next step, with which that step is there,
    # and after the update of 4 + 1 s weights again.
    alone = simulate(run, steps=20)
    assert alone.seconds == pytest.approx((10 + 0.5 + 50 + 5 + 0.5) / 2)
    assert alone.busy["rollout"] == together.busy["rollout"] == pytest.approx((10 + 50) / 2 + 0.5)


def test_what_is_under_way_is_computed_again_after_weights_are_loaded_in_flight() -> None:
    """By hand: a sample of 10 s, within whose first second the one before is learned from, at 4 + 0.5 tokens."""
    run = SimulatedRun(1, 1, 4.0, 14.0, lambda step: [10.0], SamplingGroup(1, 1, 1, lambda n: 1.0, recompute_s=0.1), {},
                       TrainingGroup(0.0, 0.5, 0.25), max_staleness=1, in_flight=True)  # fmt: skip
    assert simulate(run).seconds == pytest.approx(10 + 0.25 + 0.1 * 4.5)
    assert simulate(replace(run, in_flight=False)).seconds == pytest.approx(10 + 0.25)
    spared = DriverTimes(spared_s=0.15)  # of a push, in which it goes on, and has more to compute again
    step = simulate(replace(run, driver=spared))
    assert step.seconds == step.busy["rollout"] == pytest.approx(10 + 0.1 + 0.1 * 4.65)
    assert replace(run, driver=DriverTimes(spared_s=9.0)).spared_s == 0.25  # not more than all of it
    assert simulate(replace(run, driver=spared, in_flight=False)).seconds == pytest.approx(10 + 0.25)


def test_a_place_is_free_as_soon_as_its_sample_is_generated() -> None:
    """With room for one request the engine never waits for the teacher."""
    run = replace(RUN, sampling=SamplingGroup(1, 1, 1, lambda n: 1.0))
    assert simulate(run).seconds == pytest.approx(4 * 10 + 3 + 4.75)


def test_supervised_training_is_updates_alone() -> None:
    step = simulate_layout(layout_of("+recipe=sft", "model.size=1.5b", "plan.gpu_type=h200"), 0)
    assert step.seconds == step.busy["actor"] > 0


def test_groups_on_the_same_devices_slow_each_other_down() -> None:
    """Nothing is gained by working at the same time."""
    everyone = dict.fromkeys(("actor", "rollout", "teacher"), "actor")
    alone = 20 + 12 + 4.75
    assert simulate(replace(RUN, hosts=everyone)).seconds == pytest.approx(alone)
    assert simulate(replace(RUN, hosts=everyone, max_staleness=2), steps=12).seconds == pytest.approx(alone, rel=0.1)


def test_engines_share_a_batch_and_groups_of_samples_stay_together() -> None:
    """Eight groups of two on four engines, each with room for two: two waves."""
    run = replace(RUN, n_prompts=8, n=2, lengths=lambda step: [10.0] * 16, scoring={},
                  sampling=SamplingGroup(4, 4, 2, lambda n: 1.0))  # fmt: skip
    assert simulate(run).generate == pytest.approx(20)


LARGE = ("+recipe=on_policy_distill", "model.size=1.5b", "teacher.model.size=3b", "plan.gpu_type=h200",
         "rollout.max_response_length=4096", "plan.response_length=1000", "plan.prompt_length=200",
         "trainer.n_gpus_per_node=2")  # fmt: skip


@pytest.mark.parametrize("more", [(), ("trainer.batch_size=1024", "rollout.n_gpus_per_node=8", "rollout.nnodes=5")])
def test_a_coarse_batch_takes_as_long_as_a_whole_one(more: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    layout = layout_of(*LARGE, "trainer.batch_size=1024", *more)
    coarse = [simulate_layout(layout, staleness).seconds for staleness in (0, 1)]
    monkeypatch.setattr(steps, "MOST_SAMPLES", 1024)
    monkeypatch.setattr(steps, "MOST_ENGINES", 1024)
    assert coarse == pytest.approx([simulate_layout(layout, staleness).seconds for staleness in (0, 1)], rel=0.1)


def test_a_group_of_many_samples_is_simulated_by_few(monkeypatch: pytest.MonkeyPatch) -> None:
    many = layout_of(*LARGE, "trainer.batch_size=2", "rollout.n=2048")
    run = run_of(many, 0, Factors())
    assert (run.n_prompts, run.n, len(run.lengths(1))) == (1, 256, 256)
    assert run_of(layout_of("+recipe=grpo", "rollout.n=2048"), 0, Factors()).updating.unit == 256
    coarse = simulate_layout(many, 0)
    monkeypatch.setattr(steps, "MOST_SAMPLES", 4096)
    assert coarse.seconds == pytest.approx(simulate_layout(many, 0).seconds, rel=0.1)


def test_lengths_have_the_mean_and_the_longest_of_a_batch() -> None:
    layout = layout_of(*LARGE, "trainer.batch_size=4096")
    lengths = response_lengths(layout, 256, 1)
    assert sum(lengths) / 256 == pytest.approx(1000, rel=0.01)
    assert max(lengths) == 4096  # of 4,096 responses the longest is 5.8 times the mean: cut
    assert sorted(lengths) == sorted(response_lengths(layout, 256, 2)) != lengths
    assert set(response_lengths(layout_of(*LARGE, "plan.response_length=null"), 256, 1)) == {4096}


def test_streaming_is_what_a_run_of_the_layout_would_do() -> None:
    layout = layout_of(*LARGE)
    assert streams(layout)
    hidden = simulate_layout(layout, 0).seconds
    whole = layout_of(*LARGE, "schedule.streaming=false")
    assert not streams(whole)
    assert hidden < simulate_layout(whole, 0).seconds
    assert not streams(layout_of(*LARGE, "actor.epochs=2"))
    assert not streams(layout_of(*LARGE[:-1], "placement=single_gpu"))


# The example of docs/planning.md.
EXAMPLE = ("+recipe=on_policy_distill", "placement=8gpu", "model.size=7b", "teacher.model.size=32b",
           "plan.gpu_type=h100-80gb", "trainer.batch_size=1024", "rollout.n=4", "rollout.max_response_length=8192",
           "plan.prompt_length=500", "plan.response_length=3000")  # fmt: skip
MOMENTS = (*EXAMPLE, "actor.offload_optimizer=true", "actor.gradient_checkpointing=true")
WEIGHTS = (*EXAMPLE, "actor.offload_weights=true")


def test_a_streamed_step_takes_the_actors_time_and_a_tail() -> None:
    """The tail is what the actor waits for before its first chunk: at most the sampling, whose scoring it works beside.

    It works as long as without streaming, so no schedule takes less at staleness 0, nor beyond it.
    """
    whole = simulate_layout(layout_of(*MOMENTS, "schedule.streaming=false"), 0)
    streamed, ahead = (simulate_layout(layout_of(*MOMENTS), staleness) for staleness in (0, 1))
    actor = whole.busy["actor"]
    assert [step.busy["actor"] for step in (streamed, ahead)] == pytest.approx([actor, actor])
    assert whole.seconds == pytest.approx(whole.scored + actor)
    assert actor <= streamed.seconds <= actor + streamed.generate < whole.seconds
    assert ahead.seconds == pytest.approx(actor, rel=0.001)
    assert [round(step.seconds) for step in (whole, streamed, ahead)] == [3824, 3391, 3268]
    larger = layout_of(*WEIGHTS, "actor.max_tokens_per_micro_batch=11264")
    by_weights = [round(simulate_layout(layout, 0).seconds) for layout in (layout_of(*WEIGHTS), larger)]
    assert by_weights == [6052, 4440]
    memory = [next(group for group in all_memory(layout) if group.group == "actor")
              for layout in (layout_of(*MOMENTS), larger)]  # fmt: skip
    assert all(group.fits for group in memory)
    assert [round(group.total / 1e9, 1) for group in memory] == [73.9, 83.2]
    fastest = best_splits(layout_of(*WEIGHTS), 8)[0]
    assert fastest.gpus == {"actor": 4, "rollout": 1, "teacher": 3}
    assert round(fastest.step.seconds) == 897


def test_a_layout_is_simulated_as_its_settings_have_it() -> None:
    two_engines = (*LARGE, "rollout.n_gpus_per_node=2", "schedule.max_staleness=1")

    def planned(*settings: str, staleness: int = 1) -> SimulatedRun:
        return run_of(layout_of(*two_engines, *settings), staleness, Factors())

    ways = [planned(f"weights.transfer={way}").together for way in ("nccl", "object_store")]
    assert ways == [True, False]
    in_flight = planned("schedule.in_flight=true")
    assert in_flight.in_flight and in_flight.sampling.recompute_s > 0
    assert planned("schedule.in_flight=true", "schedule.recompute_cache=false").sampling.recompute_s == 0
    assert not planned("schedule.in_flight=true", staleness=0).in_flight  # whatever is set, as there is none to change
    one, two = (planned("actor.max_tokens_per_micro_batch=8192", f"trainer.n_gpus_per_node={n}") for n in (1, 2))
    assert one.updating.chunk_tokens is not None
    assert two.updating.chunk_tokens == pytest.approx(2 * one.updating.chunk_tokens, rel=0.01)


def test_factors_scale_what_they_are_of() -> None:
    layout = layout_of(*LARGE, "schedule.streaming=false")
    one, other = simulate_layout(layout, 0), simulate_layout(layout, 0, Factors(2.0, 2.0, 2.0, 2.0))
    assert other.seconds == pytest.approx(2 * one.seconds)
    assert other.generate == pytest.approx(2 * one.generate)


def test_on_shared_cores_a_runs_timings_give_its_step(tmp_path: Path) -> None:
    """What was measured of sampling has the scoring in it that went on beside it."""
    recipe = ("+recipe=on_policy_distill", "schedule.streaming=false")
    layout = layout_of(*recipe, on_cpu=True)
    (tmp_path / "config.yaml").write_text(dump_yaml(layout.config))
    row = {"timing_s/generate": 0.2, "timing_s/score": 0.1, "timing_s/update": 0.15, "timing_s/sync": 0.05}
    lines = [json.dumps({"step": step, "response/length_mean": 9.0, **row}) for step in (1, 2, 3)]
    (tmp_path / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    factors = factors_of(str(tmp_path), layout)
    layout = replace(layout, config=factors.lengths(layout.config))
    step = simulate_layout(layout, 0, factors)
    assert step.scored == pytest.approx(0.3)
    assert step.seconds == pytest.approx(sum(row.values()))

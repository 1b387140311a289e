"""Advice where something does not fit, and the check that ends a run with it."""

from __future__ import annotations

import io
import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from gkd.config import load
from gkd.config.compose import compose
from gkd.config.device import GB, GIB
from gkd.errors import ConfigError
from gkd.planning.advice import advise as advise_module
from gkd.planning.advice.advise import (
    advise,
    advise_all,
    advise_by_memory,
    explain_no_advice,
    explain_shortage,
    require_memory,
)
from gkd.planning.advice.changes import Value, actor_changes, memory_with
from gkd.planning.advice.report import plan, show
from gkd.planning.layout import Layout, has_room, require_lengths
from gkd.planning.memory.colocation import all_memory
from gkd.planning.memory.pools import GroupMemory
from tests.error_text import contains_in_order
from tests.planning.layouts import DATA, layout_of, layout_with

GRPO = ("+recipe=grpo", "model.size=1.5b", "placement=8gpu")
CASES = {
    "actor": (*GRPO, "plan.gpu_type=a100-40gb"),
    "actor 7b": ("+recipe=grpo", "model.size=7b", "placement=8gpu"),
    "actor 3b on 24 GB": ("+recipe=grpo", "model.size=3b", "placement=4gpu", "plan.gpu_type=rtx-4090"),
    "teacher": ("+recipe=on_policy_distill", "model.size=1.5b", "teacher.model.size=32b", "placement=8gpu",
                "plan.gpu_type=a100-40gb"),
    "rollout": ("+recipe=grpo", "model.size=7b", "placement=8gpu", "rollout.gpu_memory_utilization=0.2"),
    "rollout with heads that 8 does not divide": ("+recipe=grpo", "model.size=7b", "rollout.n_gpus_per_node=8",
                                                  "plan.gpu_type=rtx-3060", "plan.gpus_per_node=16"),
    "rollout on one GPU": ("+recipe=grpo", "model.size=32b", "plan.gpu_type=a100-40gb"),
    "rollout that shares": ("+recipe=grpo", "model.size=0.5b", "placement=single_gpu",
                            "rollout.gpu_memory_utilization=0.9", "cluster.offload=false"),
    "teacher with little room": ("+recipe=on_policy_distill", "model.size=0.5b", "teacher.model.size=7b",
                                 "teacher.n_gpus_per_node=2", "plan.gpu_type=rtx-3060"),
    "actor with a range": ("+recipe=grpo", "model.size=7b", "trainer.gpus=0-1", "rollout.gpus=2-3"),
    "actor on shared GPUs": ("+recipe=grpo", "model.size=7b", "placement=2gpu", "plan.gpu_type=h200",
                             "cluster.offload=false"),
    "rollout that no node holds": ("+recipe=grpo", "model.size=405b", "plan.gpu_type=h100-80gb"),
    "rollout of several engines that no node holds": ("+recipe=grpo", "model.size=405b", "plan.gpu_type=h100-80gb",
                                                      "rollout.n_gpus_per_node=8", "rollout.nnodes=3"),
    "teacher on a larger node than is planned": ("+recipe=on_policy_distill", "model.size=3b",
                                                 "teacher.model.size=405b", "plan.gpu_type=h100-80gb",
                                                 "teacher.gpus=0-15", "teacher.tensor_parallel_size=8"),
    "rollout with a width that does not divide its heads": (
        "+recipe=grpo", "model.size=7b", "rollout.n_gpus_per_node=8", "rollout.tensor_parallel_size=8"),
    "rollout that takes a whole node": ("+recipe=grpo", "model.size=70b", "plan.gpu_type=rtx-4090"),
    "rollout for which there is another node": ("+recipe=grpo", "model.size=70b", "plan.gpu_type=rtx-4090",
                                                "placement=2x8gpu"),
    "actor that the strongest of all changes do not help": (
        "+recipe=on_policy_distill", "model.size=14b", "teacher.model.size=1.5b", "plan.memory_gb=14",
        "trainer.batch_size=1", "rollout.n_gpus_per_node=4", "rollout.tensor_parallel_size=4"),
    "teacher that no node holds": ("+recipe=on_policy_distill", "model.size=7b", "teacher.model.size=405b",
                                   "plan.gpu_type=h100-80gb", "teacher.n_gpus_per_node=8"),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
def test_pasted_advice_fits_and_none_of_it_could_be_left_out(case: str) -> None:
    overrides, group = CASES[case], case.split(maxsplit=1)[0]
    s = layout_of(*overrides)
    advice = list(advise(s, group))
    assert [one.level for one in advice] == sorted({one.level for one in advice})
    assert _memory(layout_of(*overrides, *advice[0].overrides().split()), group).fits
    for one in advice:
        pasted = load(s.config.with_settings(one.settings).model_dump())
        assert _memory(replace(s, config=pasted), group).fits
        widths = [name for name in one.settings if name.endswith("tensor_parallel_size")]
        follows = ("n_gpus_per_node", "nnodes", "across_nodes")  # what a width asks for
        for left_out in one.settings.keys() - {
            name.replace("tensor_parallel_size", other) for name in widths for other in follows
        }:
            fewer = {name: value for name, value in one.settings.items() if name != left_out}
            assert not _memory(replace(s, config=s.config.with_settings(fewer)), group).fits


@pytest.mark.parametrize("mean", ["plan.response_length=250", "plan.prompt_length=1000"])
def test_no_limit_is_advised_below_a_mean_length_that_is_given(mean: str) -> None:
    """The plan itself would refuse what was pasted."""
    case = ("+recipe=grpo", "model.size=7b", "actor.lora.r=16", "placement=8gpu", "plan.gpu_type=rtx-4090", mean)
    s = layout_of(*case)
    for one in advise(s, "actor"):
        require_lengths(layout_of(*case, *one.overrides().split()).config, s.models)
    setting = "rollout.max_response_length" if "response" in mean else "data.max_prompt_length"
    offered = [change.setting for change in actor_changes(s.config, s.workload.longest, None) if change.values]
    assert setting not in offered
    assert {"rollout.max_response_length", "data.max_prompt_length"} & set(offered)


def _memory(layout: Layout, group: str) -> GroupMemory:
    return next(memory for memory in all_memory(layout) if memory.group == group)


ALL = {
    "two groups, one GPU left": ("+recipe=on_policy_distill", "model.size=3b", "teacher.model.size=32b",
                                 "plan.gpu_type=rtx-4090", "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2",
                                 "plan.nodes=[8]"),
    "two groups on a node": ("+recipe=on_policy_distill", "model.size=7b", "teacher.model.size=72b",
                             "placement=8gpu", "plan.gpu_type=h100-80gb"),
    "two groups on the same GPUs": ("+recipe=grpo", "model.size=1.5b", "placement=single_gpu", "plan.gpu_type=rtx-4090",
                                    "cluster.offload=false"),
    "three groups": ("+recipe=on_policy_distill", "model.size=7b", "teacher.model.size=32b", "plan.gpu_type=a100-40gb",
                     "placement=2x8gpu", "rollout.gpu_memory_utilization=0.3"),
    "two engines with the usual share": ("+recipe=on_policy_distill", "model.size=1.5b", "teacher.model.size=1.5b",
                                         "teacher.colocate_with=rollout", "teacher.engine=vllm",
                                         "plan.gpu_type=h100-80gb", "plan.nodes=[2]"),
    "one that no change of its own helps": (
        "+recipe=gspo", "model.size=14b", "placement=single_gpu", "plan.memory_gb=123", "actor.lora.r=64",
        "actor.lora.quantize=nf4", "rollout.gpu_memory_utilization=0.1"),
    "one that is there no more": ("+recipe=grpo", "model.size=7b", "algorithm.kl.coef=0.1", "placement=4gpu",
                                  "reference.gpu_memory_utilization=0.2", "plan.memory_gb=18"),
}  # fmt: skip


@pytest.mark.parametrize("case", ALL)
def test_advice_for_all_groups_at_once_composes_and_fits_and_none_is_called_hopeless(case: str) -> None:
    s = layout_of(*ALL[case])
    assert sum(not memory.fits for memory in all_memory(s)) > 1
    planned = plan(s, None, None, False)
    assert planned.all_groups
    pasted = layout_of(*ALL[case], *planned.all_groups.split())
    assert all(memory.fits for memory in all_memory(pasted))
    assert pasted.nodes == s.nodes  # as many GPUs as there were
    assert s.nodes is not None
    out = io.StringIO()
    show(planned, out)
    assert planned.all_groups in " ".join(out.getvalue().split())
    assert not any(explain_no_advice(planned.layout, memory) in out.getvalue() for memory in planned.memory)


def test_what_is_asked_of_one_group_leaves_gpus_for_the_next() -> None:
    """Each group's own advice takes all the GPUs that are left of the node."""
    case = ALL["two groups, one GPU left"]
    s = layout_of(*case)
    own = [next(advise(s, group)).overrides() for group in ("actor", "teacher")]
    assert not has_room(layout_of(*case, *" ".join(own).split()).config, (8,))
    assert has_room(layout_of(*case, *str(advise_all(s)).split()).config, (8,))


@pytest.mark.parametrize(
    ("most", "overrides"),
    [
        (4000, ("+recipe=on_policy_distill", "model.size=7b", "teacher.model.size=72b", "plan.gpu_type=a100-40gb",
                "placement=3gpu", "actor.lora.r=64")),
        (1000, ("+recipe=distill_and_reward", "model.size=3b", "teacher.model.size=1.5b", "plan.gpu_type=rtx-3060",
                "placement=single_gpu", "algorithm.kl.coef=0.1")),
        (2000, ("+recipe=grpo", "model.size=7b", "placement=single_gpu", "plan.gpu_type=rtx-4090")),
    ],
)  # fmt: skip
def test_a_plan_tries_few_changes_where_several_groups_do_not_fit(
    most: int, overrides: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What takes time is a group's memory after a set of changes; ``most`` is a third more than it is worked out."""
    tried: list[object] = []

    def counted(layout: Layout, group: str, settings: Mapping[str, Value]) -> GroupMemory:
        tried.append(settings)
        return memory_with(layout, group, settings)

    monkeypatch.setattr(advise_module, "memory_with", counted)
    planned = plan(layout_of(*overrides), None, None, False)
    assert 0 < len(tried) < most
    assert sum(not memory.fits for memory in planned.memory) > 1


@pytest.mark.parametrize("placement", ["single_gpu", "3gpu", "8gpu", "2x8gpu"])
def test_advice_keeps_to_the_machines_a_placement_is_for(placement: str) -> None:
    small = layout_of("+recipe=grpo", "model.size=7b", f"placement={placement}", "plan.gpu_type=rtx-4090")
    assert small.nodes is not None
    advice = list(advise(small, "actor"))
    assert advice
    assert all(has_room(small.config.with_settings(one.settings), small.nodes) for one in advice)


def test_where_only_nodes_are_lacking_that_is_said() -> None:
    s = layout_of(*CASES["rollout that no node holds"])
    explanation = explain_shortage(replace(s, nodes=(8,)), "rollout")
    assert explanation.endswith(explain_no_advice(replace(s, nodes=(8,)), _memory(s, "rollout")))
    assert "nodes" in explanation.rpartition(";")[2]


def test_a_reference_of_its_own_excludes_adapters(tmp_path: Path) -> None:
    """With adapters the reference is the student at its start, and the configuration refuses another."""
    (tmp_path / "config.json").write_text(json.dumps({
        "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 3, "num_attention_heads": 6, "vocab_size": 300
    }))  # fmt: skip
    case = (*GRPO, "plan.gpu_type=a100-40gb", "algorithm.kl.coef=0.1", f"reference.model.path={tmp_path}")
    advice = list(advise(layout_of(*case), "actor"))
    assert [one.level for one in advice] == [1, 2, 3, 4]
    for one in advice:
        assert _memory(layout_of(*case, *one.overrides().split()), "actor").fits


def test_what_others_leave_no_room_for_is_told_as_that() -> None:
    shared = layout_of("+recipe=on_policy_distill", "model.size=14b", "teacher.model.size=7b", "placement=single_gpu",
                      "plan.gpu_type=a100-40gb")  # fmt: skip
    assert not _memory(shared, "teacher").fits
    assert list(advise(shared, "teacher")) == []
    assert contains_in_order(explain_shortage(shared, "teacher").rpartition(";")[2], "GPUs", "GPUs")


def test_a_run_is_told_what_groups_that_share_gpus_can_do_together() -> None:
    s = layout_of(*ALL["two engines with the usual share"])
    shares = "rollout.gpu_memory_utilization=0.425 teacher.gpu_memory_utilization=0.425"
    with pytest.raises(ConfigError, match=rf"teacher needs .* and has .*; this fits: {shares}; plan.check=false"):
        require_memory(s.config, s.models, {"teacher": s.hardware.memory}, (2,))


def test_smaller_micro_batches_come_before_anything_that_trains_less() -> None:
    advice = list(advise(layout_of(*CASES["actor"]), "actor"))
    assert [one.level for one in advice] == [1, 2, 3, 4, 5]
    assert list(advice[0].settings) == ["actor.max_tokens_per_micro_batch"]
    assert "actor.lora.r" in advice[4].settings
    assert advice[0].saves > 0


def test_what_fits_needs_no_advice() -> None:
    assert list(advise(layout_of(*GRPO, "plan.gpu_type=h200"), "actor")) == []


def test_what_nothing_helps_is_said_to_be_so() -> None:
    hopeless = layout_of("+recipe=grpo", "model.size=405b", "plan.gpu_type=rtx-3060")
    assert list(advise(hopeless, "actor")) == []
    assert contains_in_order(explain_shortage(hopeless, "actor").rpartition(";")[2], "model", "GPU")


def test_less_memory_asks_more() -> None:
    rows = advise_by_memory(layout_of("+recipe=grpo", "model.size=1.5b"), [12.0, 40.0, 141.0])
    assert [fits for _, _, fits in rows] == [False, False, True]
    small, middle = rows[0][1], rows[1][1]
    assert middle is not None
    assert middle.level == 1
    assert small is not None
    assert small.level > 1 or len(small.settings) > len(middle.settings)


def test_no_width_is_advised_that_vllm_refuses() -> None:
    """Phi-4 has 40 heads and 10 for keys and values, which 4 GPUs do not share."""
    own = {"model_type": "phi3", "hidden_size": 5120, "intermediate_size": 17920, "num_hidden_layers": 40,
           "num_attention_heads": 40, "num_key_value_heads": 10, "vocab_size": 100352}  # fmt: skip
    for gpu, advised in (("rtx-4090", [{"rollout.tensor_parallel_size": 2}]), ("rtx-3060", [])):
        s = layout_with(own, "+recipe=grpo", "model.size=14b", f"plan.gpu_type={gpu}", "rollout.n_gpus_per_node=4")
        assert [dict(one.settings) for one in advise(s, "rollout")] == advised
        config = s.config.with_settings({"rollout.tensor_parallel_size": 4})
        with pytest.raises(
            ConfigError, match=r"^rollout: tensor_parallel_size=4 .*\b10\b.*plan\.check=false"
        ) as caught:
            require_memory(config, s.models, {"rollout": s.hardware.memory})
        assert "\n" not in str(caught.value)


def test_a_layout_that_cannot_fit_ends_in_one_line() -> None:
    s = layout_of(*CASES["actor 7b"])
    card = {"actor": 80e9, "rollout": 80e9}
    with pytest.raises(
        ConfigError, match=r"actor needs \d+\.\d GB of each GPU and has 80.0; this fits: .*=.*; plan.check=false"
    ) as caught:
        require_memory(s.config, s.models, card)
    assert "\n" not in str(caught.value)
    require_memory(compose([*DATA, *CASES["actor 7b"], "plan.check=false"]), s.models, card)
    require_memory(s.config, s.models, {"actor": 500e9, "rollout": 80e9})
    require_memory(s.config, s.models, {"rollout": 80e9})


def test_what_is_estimated_of_a_model_is_no_reason_to_end_a_run(caplog: pytest.LogCaptureFixture) -> None:
    """And none to decide nothing: an estimate is nearer than what no group would have."""
    s, card = layout_of(*CASES["actor 7b"]), {"actor": 80e9, "rollout": 80e9}
    models = replace(s.models, student=replace(s.models.student, is_exact=False, note="as Llama"))
    caplog.set_level("WARNING", "gkd")
    require_memory(s.config, models, card)
    assert contains_in_order(caplog.text, "actor", "GB", "estimate", "as Llama")


@pytest.mark.parametrize(("gpus", "more"), [((), True), ((8,), True), ((4,), False), ((1, 3), False)])
def test_a_run_is_advised_no_more_gpus_than_there_are(gpus: tuple[int, ...], more: bool) -> None:
    s = layout_of(*GRPO)  # three GPUs are the rollout's
    with pytest.raises(ConfigError, match=r"this fits: ") as caught:
        require_memory(s.config, s.models, {"actor": 12e9}, gpus)
    assert ("trainer.n_gpus_per_node=" in str(caught.value)) == more


def test_gpus_that_no_group_has_are_advised_before_the_hosts_memory() -> None:
    """Of eight GPUs the engines have three and no teacher takes the others."""
    s = layout_of("+recipe=grpo", "model.size=7b", "placement=8gpu", "plan.gpu_type=h100-80gb")
    gpus, moments, weights = list(advise(s, "actor"))[:3]
    assert (gpus.settings["trainer.n_gpus_per_node"], gpus.host) == (5, 0)
    assert gpus.slower < 1 < weights.slower
    assert 0 < moments.host < weights.host


def test_moments_go_to_the_host_before_weights_do() -> None:
    """The actor of docs/planning.md has no more GPUs; weights come over the host's link for every micro-batch."""
    s = layout_of(
        "+recipe=on_policy_distill", "placement=8gpu", "model.size=7b", "teacher.model.size=32b",
        "plan.gpu_type=h100-80gb", "trainer.batch_size=1024", "rollout.n=4", "rollout.max_response_length=8192",
        "plan.prompt_length=500", "plan.response_length=3000",
    )  # fmt: skip
    moments, weights = list(advise(s, "actor"))[:2]
    assert moments.settings == {"actor.gradient_checkpointing": True, "actor.offload_optimizer": True}
    assert weights.settings == {"actor.offload_weights": True}
    assert moments.slower < weights.slower and moments.host < weights.host


def test_a_run_is_advised_no_more_nodes_than_there_are() -> None:
    whole = layout_of("+recipe=grpo", "model.size=7b", "trainer.n_gpus_per_node=8", "plan.gpu_type=rtx-4090")
    assert any("trainer.nnodes" in one.settings for one in advise(whole, "actor"))
    for nodes, expected in ((2, set()), (3, {2})):  # one is the rollout's
        advice = list(advise(replace(whole, nodes=(8,) * nodes), "actor"))
        assert advice
        assert {one.settings["trainer.nnodes"] for one in advice if "trainer.nnodes" in one.settings} == expected


@pytest.mark.parametrize(
    "overrides",
    [
        ("trainer.gpus_by_node=[0-7,0-7]", "rollout.n_gpus_per_node=8"),
        ("trainer.n_gpus_per_node=8", "trainer.colocate_with=rollout", "rollout.n_gpus_per_node=8"),
    ],
)
def test_named_and_shared_gpus_stay_as_many_as_they_are(overrides: tuple[str, ...]) -> None:
    case = ("+recipe=grpo", "model.size=70b", "plan.gpu_type=h100-80gb", "rollout.tensor_parallel_size=8", *overrides)
    advice = list(advise(layout_of(*case), "actor"))
    assert advice
    for one in advice:
        assert _memory(layout_of(*case, *one.overrides().split()), "actor").fits


def test_an_engine_that_no_node_holds_is_advised_whole_nodes_as_long_as_there_are_some_for_the_others() -> None:
    wide = layout_of(*CASES["teacher that no node holds"])
    whole = {"tensor_parallel_size": 16, "nnodes": 2, "across_nodes": True}
    (one,) = advise(replace(wide, nodes=(8, 8, 8)), "teacher")
    assert {name.removeprefix("teacher."): value for name, value in one.settings.items()} == whole
    for nodes in ((8, 8), (8, 4, 4)):
        assert list(advise(replace(wide, nodes=nodes), "teacher")) == []
    assert list(advise(layout_of(*CASES["teacher that no node holds"], "teacher.gpus=0-7"), "teacher")) == []
    held = layout_of("+recipe=grpo", "model.size=70b", "plan.gpu_type=h100-80gb", "rollout.n_gpus_per_node=8")
    assert not any("rollout.across_nodes" in one.settings for one in advise(held, "rollout"))


def test_on_a_cpu_all_groups_share_its_memory() -> None:
    own = ("+recipe=on_policy_distill", "placement=cpu")
    s = layout_of(*own, "plan.memory_gb=8", on_cpu=True)
    require_memory(s.config, s.models, None)
    large = compose([*own, "plan.memory_gb=8", "rollout.kv_cache_gb=6"])
    with pytest.raises(ConfigError, match=r"this fits: "):
        require_memory(large, s.models, None)


def test_a_cache_that_a_machine_has_no_memory_for_is_made_as_much_smaller_as_it_takes() -> None:
    """One group's change is then enough for all, and what it saves is of the machine."""
    s = layout_of("+recipe=grpo", "placement=cpu", "plan.memory_gb=8", "rollout.kv_cache_gb=100", on_cpu=True)
    planned = plan(s, None, None, False)
    assert all(not memory.fits for memory in planned.memory)
    (one,) = [advice for advice in planned.advice if advice.level == 1]
    assert one.settings == {"rollout.kv_cache_gb": 3} and planned.all_groups == one.overrides()
    assert one.saves == (100 - 3) * GIB
    out = io.StringIO()
    show(planned, out)
    assert not any(explain_no_advice(planned.layout, memory) in out.getvalue() for memory in planned.memory)
    assert contains_in_order(out.getvalue(), one.overrides(), f"{97 * GIB / GB:.1f} GB", "machine")
    assert one.overrides() in explain_shortage(s, "actor")


def test_copies_of_the_student_that_do_not_fit_are_advised_to_be_wider() -> None:
    case = ("+recipe=grpo", "model.size=7b", "trainer.n_gpus_per_node=8", "rollout.n_gpus_per_node=8",
            "plan.gpu_type=h100-80gb")  # fmt: skip
    advice = next(advise(layout_of(*case, "actor.fsdp_size=1"), "actor"))
    assert (advice.level, advice.settings) == (1, {"actor.fsdp_size": 8})
    fits = [_memory(layout_of(*case, f"actor.fsdp_size={size}"), "actor").fits for size in (1, 2, 4, 8)]
    assert fits == [False, False, False, True]

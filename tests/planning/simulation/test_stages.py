"""Stage times against what was measured on one H200 (2026-11), how they change with a layout, and the step of them."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from gkd.errors import ConfigError
from gkd.planning.memory.pools import samples_a_prompt
from gkd.planning.shapes import shape_of
from gkd.planning.simulation.stages import (
    ENGINE_STEP_S,
    HOST_LINK,
    Stages,
    adam_s,
    decode_s,
    device_shares,
    estimate_step_s,
    forward_flops,
    gather_s,
    generate_s,
    head_flops,
    score_one_s,
    score_s,
    stages_of,
    sum_s,
    update_s,
    weights_read,
)
from gkd.planning.simulation.steps import simulate_layout
from gkd.planning.transfer import require_transfer, transfer_of
from tests.planning.layouts import QWEN3_30B, layout_of, layout_with

H200 = ("+recipe=on_policy_distill", "model.size=0.5b", "teacher.model.size=1.5b", "plan.gpu_type=h200")
STAGES = Stages(generate=5.0, score=3.0, reference=0.0, update=4.0, sync=1.0, tail=0.5)


@pytest.mark.parametrize(
    ("hosts", "seconds"),
    [
        ({}, 5.0 + 0.5 + 4.0 + 1.0),
        (dict.fromkeys(("actor", "rollout", "teacher"), "actor"), 5.0 + 3.0 + 4.0 + 1.0),
        ({"rollout": "actor"}, 5.0 + 0.5 + 4.0 + 1.0),
    ],
)
def test_the_quick_estimate_of_a_step(hosts: dict[str, str], seconds: float) -> None:
    assert estimate_step_s(STAGES, hosts) == seconds


def test_scoring_is_near_the_measured_rate() -> None:
    """Qwen2.5's 1.5B, 128 sequences of 1,024 tokens: 76,394 tokens/s with the top 64 of every row."""
    lengths = ("trainer.batch_size=128", "data.max_prompt_length=1", "rollout.max_response_length=1023")
    s = layout_of(*H200, *lengths, "teacher.engine=vllm")
    assert 128 * 1024 / score_s(s, "teacher", s.config.teacher) == pytest.approx(76_394, rel=0.1)


@pytest.mark.parametrize(("model", "measured"), [("teacher", 87_141), ("student", 335_000)])
def test_layers_alone_are_near_the_measured_rate(model: str, measured: float) -> None:
    """vLLM's bare prefill of the 1.5B, and torch's forward pass of the 0.5B without its head."""
    s = layout_of(*H200)
    assert s.hardware.flops / forward_flops(s.models.shape_of(model), 512) == pytest.approx(measured, rel=0.1)


def test_no_scorer_computes_faster_than_its_gpu() -> None:
    """Where matrix products alone reach most of what there is, compilation gains no more than the rest."""
    settings = ("teacher.model.size=32b", "trainer.batch_size=64", "plan.tflops=500")
    usual, most = (layout_of(*H200, *settings, f"plan.efficiency={share}") for share in (0.8, 1.0))
    eager = layout_of(*H200, *settings, "plan.efficiency=1.0", "teacher.enforce_eager=true")
    seconds = [score_s(s, "teacher", s.config.teacher) for s in (usual, most, eager)]
    assert seconds == pytest.approx(seconds[-1:] * 3)


def test_layers_with_experts_are_not_compiled() -> None:
    """Where torch scores with such a model because it is named."""
    layouts = [layout_of(*H200, "teacher.engine=torch", f"teacher.enforce_eager={eager}") for eager in (False, True)]
    for shape, gain in ((layouts[0].models.teacher, 1.9), (shape_of(QWEN3_30B), 1.0)):
        compiled, eager = (replace(s, models=replace(s.models, teacher=shape)) for s in layouts)
        seconds = [score_s(s, "teacher", s.config.teacher) for s in (eager, compiled)]
        assert seconds[0] == pytest.approx(gain * seconds[1])


def test_a_step_is_near_the_measured_one() -> None:
    """All on one GPU, 128 x (128 + 512) tokens, on three machines, of which the first scored eagerly."""
    lengths = ("trainer.batch_size=128", "data.max_prompt_length=128", "rollout.max_response_length=512")
    s = layout_of(*H200, "placement=single_gpu", *lengths)
    stages = stages_of(s)
    assert stages.generate == pytest.approx((1.53 + 2.19 + 2.04) / 3, rel=0.1)
    assert stages.score == pytest.approx((0.557 + 0.549) / 2, rel=0.1)
    assert stages.update == pytest.approx((0.84 + 0.97 + 1.12) / 3, rel=0.1)
    assert stages.sync == pytest.approx((0.085 + 0.148 + 0.156) / 3, rel=0.1)
    assert estimate_step_s(stages, dict.fromkeys(("actor", "rollout", "teacher"), "actor")) == pytest.approx(
        3.83, rel=0.1
    )
    eager = stages_of(layout_of(*H200, "placement=single_gpu", *lengths, "teacher.enforce_eager=true"))
    assert eager.score == pytest.approx(0.835, rel=0.3)
    in_one_process = stages_of(layout_of(*H200, *lengths, "weights.transfer=object_store"))
    assert in_one_process.generate == pytest.approx((2.13 + 2.45) / 2, rel=0.25)


def test_on_a_gpu_that_sampling_does_not_fill_others_work_beside_it() -> None:
    """The same a step ahead, on the second and the third machine; and with a model that fills it."""
    lengths = ("trainer.batch_size=128", "data.max_prompt_length=128", "rollout.max_response_length=512")
    s = layout_of(*H200, "placement=single_gpu", *lengths)
    in_turn, ahead = (simulate_layout(s, staleness).seconds for staleness in (0, 1))
    assert in_turn == pytest.approx((3.83 + 3.85) / 2, rel=0.1)
    assert ahead == pytest.approx((2.82 + 2.64) / 2, rel=0.1)
    two = layout_of(*H200, "placement=2gpu", *lengths)  # one of two engines leaves the other one's GPU alone
    assert simulate_layout(two, 1).seconds == pytest.approx(simulate_layout(two, 0).seconds, rel=0.05)
    large = layout_of(
        *H200[:1], "model.size=32b", "teacher.model.size=32b", *H200[-1:], *lengths, "placement=single_gpu"
    )
    assert device_shares(large) == {}
    assert simulate_layout(large, 1).seconds > 0.95 * simulate_layout(large, 0).seconds


def test_the_head_is_where_it_is_needed() -> None:
    """At the response alone on a GPU, at every token in vLLM on a CPU; once more for ratios of whole responses."""
    lengths = ("data.max_prompt_length=896", "rollout.max_response_length=128", "teacher.engine=vllm")
    on_gpu, on_cpu = (layout_of(*H200, *lengths, on_cpu=on_cpu) for on_cpu in (False, True))
    for s, n_rows in ((on_gpu, 128), (on_cpu, 1024)):
        shape = s.models.shape_of("teacher")
        computed = 1024 * forward_flops(shape, 512) + n_rows * 2 * shape.head
        assert score_one_s(s, "teacher", s.config.teacher) == pytest.approx(computed / s.hardware.flops)
    grpo = ("+recipe=grpo", *H200[1:2], *H200[3:])
    by_token, by_response = (layout_of(*grpo, f"algorithm.policy.ratio={ratio}") for ratio in ("token", "sequence"))
    a_pass = by_token.workload.samples * by_token.workload.response * 2 * by_token.models.student.head
    more = update_s(by_response, 1, 1) - update_s(by_token, 1, 1)
    assert more == pytest.approx(a_pass / by_token.hardware.flops, rel=0.05)


def test_more_gpus_take_less_time() -> None:
    s = layout_of(*H200, "trainer.batch_size=512")
    more = layout_of(
        *H200, "trainer.batch_size=512", "trainer.n_gpus_per_node=2", "rollout.n_gpus_per_node=2",
        "teacher.n_gpus_per_node=2",
    )  # fmt: skip
    one, two = stages_of(s), stages_of(more)
    assert two.score == pytest.approx(one.score / 2)
    assert one.update / 2 <= two.update < one.update
    assert one.generate / 2 <= two.generate < one.generate


def test_what_costs_time_does() -> None:
    s = layout_of(*H200)
    checkpointing = layout_of(*H200, "actor.gradient_checkpointing=true")
    lora, epochs = layout_of(*H200, "actor.lora.r=8"), layout_of(*H200, "actor.epochs=2")
    now = update_s(s, 1, 1)
    assert update_s(checkpointing, 1, 1) == pytest.approx(now * 4 / 3, rel=0.1)
    assert update_s(lora, 1, 1) < 0.8 * now
    assert update_s(epochs, 1, 1) == pytest.approx(2 * now)
    sampled = [*H200, "algorithm.loss.name=sampled_reverse_kl"]
    both = update_s(layout_of(*sampled, "actor.epochs=2"), 1, 1)
    assert both > 2.2 * update_s(layout_of(*sampled), 1, 1)  # and the log-probabilities that ratios start from
    once, twice = (layout_of("+recipe=sft", *H200[1::2], f"actor.epochs={n}") for n in (1, 2))
    assert update_s(twice, 1, 1) == pytest.approx(2 * update_s(once, 1, 1))  # the data's answers have none
    longer = layout_of(*H200, "rollout.max_response_length=512")
    assert generate_s(longer, longer.config.rollout) > 1.6 * generate_s(s, s.config.rollout)


def test_an_engine_over_two_nodes_waits_for_the_network() -> None:
    """By hand: 28 layers, two sums of 1,536 bfloat16 a token and layer, one of two copies crosses, at 50 GB/s."""
    pool = ["teacher.n_gpus_per_node=2", "teacher.nnodes=2", "teacher.tensor_parallel_size=4"]
    s = layout_of(*H200, *pool, "teacher.across_nodes=true", "plan.network_gb_s=50", "trainer.batch_size=1")
    on_one = s.config.teacher.model_copy(update={"n_gpus_per_node": 4, "nnodes": 1})
    length = s.workload.prompt + s.workload.response
    waited = 28 * 2 * (20e-6 + length * 1_536 * 2 / 50e9)
    assert score_s(s, "teacher", s.config.teacher) - score_s(s, "teacher", on_one) == pytest.approx(waited)


@pytest.mark.parametrize("n", [1, 2, 4, 16, 256])
def test_a_step_reads_the_experts_that_any_of_its_tokens_goes_to(n: int) -> None:
    """Against tokens that draw 8 of 128 experts each, of 3 * 768 * 2048 numbers; and all else but the embeddings."""
    shape, rng = shape_of(QWEN3_30B), np.random.default_rng(0)
    drawn = np.mean([len({e for _ in range(n) for e in rng.choice(128, 8, replace=False)}) for _ in range(200)])
    an_expert, head = 48 * 3 * 768 * 2048, 151936 * 2048
    others = shape.n_parameters - 128 * an_expert - head
    assert weights_read(shape, n) == pytest.approx(others + drawn * an_expert, rel=0.02)


def test_a_dense_model_is_read_with_its_head_however_few_tokens_there_are() -> None:
    shape = layout_of(*H200).models.student
    assert weights_read(shape, 1) == pytest.approx(shape.n_parameters, rel=1e-3)
    assert weights_read(shape, 1) == weights_read(shape, 3) == weights_read(shape, 100)


def test_gpus_that_repeat_heads_of_the_cache_read_these_each() -> None:
    """Of four GPUs with two key-value heads, each reads one: 28 layers, 128 keys and values of 2 bytes a token."""
    wide = ("+recipe=grpo", "model.size=1.5b", "plan.gpu_type=h100-80gb", "plan.tflops=100000",
            "rollout.n_gpus_per_node=4", "rollout.tensor_parallel_size=4", "data.max_prompt_length=30000")  # fmt: skip
    s = layout_of(*wide)
    seconds = [decode_s(s, s.config.rollout, n) for n in (1000, 2000)]
    context = s.workload.prompt + s.workload.response / 2
    a_gpu = 1000 * context * 28 * 1 * 128 * 2 * 2 / (3350e9 * 0.8 * 0.85)
    assert seconds[1] - seconds[0] == pytest.approx(a_gpu, rel=0.01)


def test_a_token_attends_to_a_window_and_reads_no_more_of_the_cache() -> None:
    """By hand: of Mistral's layers with 4,096 tokens each, and of half of Gemma 2's."""
    own = {"hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32, "num_attention_heads": 32,
           "num_key_value_heads": 8, "head_dim": 128, "vocab_size": 32000, "tie_word_embeddings": True}  # fmt: skip
    long = ("+recipe=grpo", "model.size=8b", "plan.gpu_type=h100-80gb", "plan.tflops=100000",
            "data.max_prompt_length=30000")  # fmt: skip
    for kind, attended in (("llama", lambda n: n), ("mistral", lambda n: 4096), ("gemma2", lambda n: (n + 4096) / 2)):
        s = layout_with(own | {"model_type": kind}, *long)
        without, shape = forward_flops(s.models.student, 0), s.models.student
        assert forward_flops(shape, 20_000) - without == 4 * 32 * 32 * 128 * attended(20_000)
        seconds = [decode_s(s, s.config.rollout, n) for n in (1000, 2000)]
        a_gpu = 1000 * attended(30_000 + 128) * 32 * 8 * 128 * 2 * 2 / (3350e9 * 0.8)
        assert seconds[1] - seconds[0] == pytest.approx(a_gpu, rel=0.01)


def test_a_host_that_does_both_in_one_process_takes_the_time_of_both() -> None:
    """Of a small model at many sequences, whose GPU is done sooner."""
    small = ("+recipe=grpo", "model.size=0.5b", "plan.gpu_type=h200", "rollout.engine=vllm")
    seconds = {
        way: decode_s(layout, layout.config.rollout, 256)
        for way in ("ipc", "object_store")
        for layout in [layout_of(*small, f"weights.transfer={way}")]
    }
    assert seconds["object_store"] - seconds["ipc"] == pytest.approx(ENGINE_STEP_S)


def test_what_the_data_answers_is_not_sampled() -> None:
    shares = [layout_of(*H200, f"algorithm.on_policy_share={share}") for share in (1, 0.5)]
    whole, half = (generate_s(layout, layout.config.rollout) for layout in shares)
    assert half < 0.9 * whole


def test_an_adapter_alone_is_sent_at_once_and_costs_every_token() -> None:
    merged = layout_of(*H200, "actor.lora.r=16", "rollout.engine=vllm")
    alone = layout_of(*H200, "actor.lora.r=16", "rollout.engine=vllm", "weights.adapter_only=true")
    assert transfer_of(alone) == "object_store"
    assert stages_of(alone).sync < 0.1 * stages_of(layout_of(*H200, "weights.transfer=object_store")).sync
    assert 1.2 < stages_of(alone).generate / stages_of(merged).generate < 1.35


def test_a_slow_network_is_what_an_actor_of_several_nodes_waits_for() -> None:
    slow, fast = (layout_of(*H200, f"plan.network_gb_s={g}") for g in ("0.1", "400"))
    assert update_s(slow, 16, 2) > 5 * update_s(fast, 16, 2)
    assert update_s(slow, 8, 1) == update_s(fast, 8, 1)


LONG = ("+recipe=grpo", "model.size=7b", "plan.gpu_type=h100-80gb", "trainer.batch_size=1024", "rollout.n=4",
        "plan.prompt_length=500", "plan.response_length=3000")  # fmt: skip


def test_copies_within_a_node_sum_gradients_once_a_step_over_the_network() -> None:
    """Instead of weights for every micro-batch; the time of a fast network is that of the computation."""
    nodes = (*LONG, "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    whole, fast, copies = (
        layout_of(*nodes, f"plan.network_gb_s={network}", *size)
        for network, size in (("5", ()), ("100000", ()), ("5", ("actor.fsdp_size=8",)))
    )
    slow_s, fast_s, copies_s = (update_s(layout, 16, 2) for layout in (whole, fast, copies))
    assert slow_s > 2 * copies_s
    once = 4 * whole.models.student.n_parameters / 5e9  # all eight shards pass, over cards that they share
    assert copies_s == pytest.approx(fast_s + once + adam_s(copies, 16) - adam_s(whole, 16), rel=0.01)


@pytest.mark.parametrize(
    ("nnodes", "size", "by_link", "by_network"),
    [
        (1, 8, 7 / 8, 0), (1, 4, 3 / 4, 0),
        (2, 16, 15 / 16, 15 / 16),  # one ring in and out of each node
        (2, 8, 7 / 8, 0), (2, 4, 3 / 4, 0), (2, 1, 0, 0),
        (3, 24, 23 / 24, 23 / 24),
        (3, 6, 5 / 6, 2 * 5 / 6),  # GPUs 6 to 11 and 12 to 17 are on two nodes each, which share the second one
        (3, 12, 11 / 12, 2 * 11 / 12),
        (3, 3, 2 / 3, 2 * 2 / 3),
    ],
)  # fmt: skip
def test_copies_gather_over_the_network_of_the_nodes_that_they_straddle(
    nnodes: int, size: int, by_link: float, by_network: float
) -> None:
    """By hand: of every copy all parts but one pass each link of its ring, on nodes of eight GPUs."""
    s = layout_of(*LONG, f"actor.fsdp_size={size}", "trainer.n_gpus_per_node=8", f"trainer.nnodes={nnodes}",
                  "plan.link_gb_s=2", "plan.network_gb_s=1")  # fmt: skip
    assert gather_s(s, 8 * nnodes, nnodes, 1e9) == pytest.approx(max(by_link / 2, by_network))


@pytest.mark.parametrize(
    ("nnodes", "size", "by_link", "by_network"),
    [
        (1, 8, 0, 0), (1, 4, 2 * 1 / 2 / 4, 0), (1, 1, 2 * 7 / 8, 0),
        (2, 16, 0, 0), (2, 8, 2 * 1 / 2 / 8, 1),  # eight rings of an eighth each
        (2, 4, 2 * 3 / 4 / 4, 2 * 3 / 4), (2, 1, 2 * 15 / 16, 2 * 15 / 16),
        (3, 12, 2 * 1 / 2 / 12, 8 / 12),  # a node has eight of twelve shards
    ],
)  # fmt: skip
def test_copies_sum_all_shards_over_the_cards_of_a_node(
    nnodes: int, size: int, by_link: float, by_network: float
) -> None:
    """By hand: a ring for each shard, over as many GPUs as there are copies, in which all parts but one pass twice."""
    s = layout_of(*LONG, f"actor.fsdp_size={size}", "trainer.n_gpus_per_node=8", f"trainer.nnodes={nnodes}",
                  "plan.link_gb_s=2", "plan.network_gb_s=1")  # fmt: skip
    assert sum_s(s, 8 * nnodes, nnodes, 1e9) == pytest.approx(max(by_link / 2, by_network))


def test_weights_cross_the_hosts_link_for_every_micro_batch() -> None:
    """As many as the budget makes of the batch, however long a response may be and whatever packs are padded to."""
    there = (*LONG, "actor.offload_weights=true", "actor.share_prompts=false")
    layouts = [layout_of(*there, f"rollout.max_response_length={longest}", f"actor.compile={compiles}")
               for longest in (4096, 8192) for compiles in ("auto", "false")]  # fmt: skip
    times = [update_s(layout, 1, 1) - adam_s(layout, 1) for layout in layouts]
    moved = 3 * 4 * layouts[0].models.student.n_parameters  # weights twice, gradients once
    assert times == pytest.approx([4096 * 3500 / 8192 * moved / HOST_LINK] * 4)


def test_a_micro_batch_that_is_full_by_its_keys_has_fewer_tokens() -> None:
    """By hand: 256 samples of 4,100 keys, of which a micro-batch of 8,192 tokens has 16,384."""
    s = layout_of("+recipe=grpo", "model.size=0.5b", "plan.gpu_type=h100-80gb", "trainer.batch_size=16", "rollout.n=16",
                  "data.max_prompt_length=4096", "plan.prompt_length=4000", "plan.response_length=100",
                  "actor.offload_weights=true")  # fmt: skip
    moved = 3 * 4 * s.models.student.n_parameters
    assert update_s(s, 1, 1) - adam_s(s, 1) == pytest.approx(256 * 4100 / 16384 * moved / HOST_LINK)


def test_a_batch_takes_as_many_samples_as_it_has_however_it_is_cut() -> None:
    """Of 520 samples the second update learns from 8, and not from 512 again."""
    cut = (*LONG[:3], "trainer.batch_size=130", "rollout.n=4")
    whole, parts = (layout_of(*cut, *more) for more in ((), ("actor.mini_batch_size=512",)))
    learned = update_s(whole, 1, 1) - adam_s(whole, 1)
    old_logprobs = update_s(layout_of(*cut, "actor.epochs=2"), 1, 1) - 2 * update_s(whole, 1, 1)
    assert update_s(parts, 1, 1) == pytest.approx(learned + old_logprobs + 2 * adam_s(parts, 1), rel=0.01)


def test_log_probabilities_that_ratios_start_from_are_of_responses() -> None:
    """By hand: one pass of all tokens through the layers, of the responses' through the head."""
    short = ("+recipe=grpo", "model.size=0.5b", "plan.gpu_type=h100-80gb", "data.max_prompt_length=3840",
             "actor.share_prompts=false")  # fmt: skip
    once, twice = (layout_of(*short, f"actor.epochs={n}") for n in (1, 2))
    workload, shape = once.workload, once.models.student
    layers = workload.length * forward_flops(shape, workload.length / 2)
    seconds = workload.samples * (layers + workload.response * 2 * shape.head) / once.hardware.flops
    assert update_s(twice, 1, 1) - 2 * update_s(once, 1, 1) == pytest.approx(seconds)


@pytest.mark.parametrize(
    ("budget", "prompt", "response", "copies"),
    # All eight together; by tokens three or four, by keys two; the budget holds one; two of them a rank.
    [(8192, 500, 300, 8), (4096, 2000, 500, 8 / 3), (2048, 1000, 300, 8 / 3), (512, 500, 300, 1), (8192, 20, 30, 8)],
)
def test_prompts_are_computed_once_for_the_samples_that_a_micro_batch_holds(
    budget: int, prompt: int, response: int, copies: float
) -> None:
    """By hand: keys are at most twice the tokens that a micro-batch may have."""
    overrides = ("+recipe=grpo", "model.size=0.5b", "plan.gpu_type=h100-80gb", "trainer.batch_size=8", "rollout.n=8",
                 f"plan.prompt_length={prompt}", f"plan.response_length={response}", "data.max_prompt_length=4096",
                 "rollout.max_response_length=4096", f"actor.max_tokens_per_micro_batch={budget}")  # fmt: skip
    layout = layout_of(*overrides)
    assert samples_a_prompt(layout, 1) == pytest.approx(copies)
    shape, workload, flops = layout.models.student, layout.workload, layout.hardware.flops
    a_response = response * forward_flops(shape, prompt + response / 2)
    computed = a_response + prompt / copies * forward_flops(shape, prompt / 2) + response * head_flops(shape)
    apart = update_s(layout_of(*overrides, "actor.share_prompts=false"), 1, 1) - adam_s(layout, 1)
    alone = a_response + prompt * forward_flops(shape, prompt / 2) + response * head_flops(shape)
    assert apart == pytest.approx(64 * 3 * alone / flops)
    assert update_s(layout, 1, 1) - adam_s(layout, 1) == pytest.approx(64 * 3 * computed / flops)
    assert samples_a_prompt(layout, 32) == min(copies, 2) and samples_a_prompt(layout, 64) == 1
    assert workload.samples == 64


def test_each_of_two_ranks_gathers_the_half_that_it_does_not_have() -> None:
    """By hand: of every parameter 2 bytes for the forward, 2 for the backward pass, and 4 of its gradient."""
    s = layout_of(*LONG, "rollout.max_response_length=4096", "plan.link_gb_s=1", "actor.share_prompts=false")
    whole = (2 * 2 + 4) * s.models.student.n_parameters / 1e9
    for world in (2, 128):
        a_micro_batch = (update_s(s, world, 1) - adam_s(s, world)) / (4096 * 3500 / world / 8192)
        assert a_micro_batch == pytest.approx(whole * (world - 1) / world)


def test_new_weights_of_an_actor_over_two_nodes_are_gathered_over_the_network() -> None:
    """Of 16 ranks each lacks 15 parts; copies within a node lack 7 of 8, which do not cross the network."""
    two = ("+recipe=grpo", "model.size=32b", "plan.gpu_type=h100-80gb", "trainer.n_gpus_per_node=8", "trainer.nnodes=2")
    whole, copies = (stages_of(layout_of(*two, *size)).sync for size in ((), ("actor.fsdp_size=8",)))
    n_bytes = 2 * layout_of(*two).models.student.n_parameters
    assert whole - copies == pytest.approx(n_bytes * (15 / 16 / 25e9 - 7 / 8 / 450e9))


def test_moments_cross_the_hosts_link_once_a_step() -> None:
    """Each way at the same time, beside which the update takes what it takes without."""
    plain, there = (layout_of(*LONG, f"actor.offload_optimizer={value}") for value in ("false", "true"))
    assert adam_s(there, 1) == pytest.approx(2 * 4 * plain.models.student.n_parameters / HOST_LINK)
    assert adam_s(there, 1) > adam_s(plain, 1)
    assert update_s(there, 1, 1) - adam_s(there, 1) == pytest.approx(update_s(plain, 1, 1) - adam_s(plain, 1))


@pytest.mark.parametrize(
    ("overrides", "way"),
    [
        ((), "nccl"),
        (("placement=single_gpu",), "ipc"),
        (("rollout.engine=hf",), "object_store"),
        (("weights.transfer=object_store",), "object_store"),
    ],
)
def test_weights_take_the_way_that_a_run_would_choose(overrides: tuple[str, ...], way: str) -> None:
    s = layout_of(*H200, *overrides)
    assert transfer_of(s) == way
    slowest = stages_of(layout_of(*H200, *overrides, "weights.transfer=auto", "rollout.engine=hf")).sync
    assert (stages_of(s).sync < 0.1 * slowest) == (way != "object_store")


def test_a_transfer_that_cannot_work_is_not_planned() -> None:
    """But one whose packages are not installed here may be planned for a machine where they are."""
    for way, *overrides in (("ipc",), ("nccl", "placement=single_gpu")):
        layout = layout_of(*H200, *overrides, f"weights.transfer={way}")
        with pytest.raises(ConfigError, match=rf"weights\.transfer={way}: .*object_store"):
            require_transfer(layout)
    for way in ("auto", "nccl", "object_store", "sharded_rdt"):
        require_transfer(layout_of(*H200, f"weights.transfer={way}"))


def test_shards_are_sent_without_being_gathered() -> None:
    ways = ("nccl", "nccl_m2n", "sharded_rdt")
    s = {way: layout_of(*H200, "trainer.n_gpus_per_node=2", f"weights.transfer={way}") for way in ways}
    assert {transfer_of(layout) for layout in s.values()} == set(ways)
    by_nccl, shards, fetched = (stages_of(layout).sync for layout in s.values())
    assert shards < by_nccl == fetched

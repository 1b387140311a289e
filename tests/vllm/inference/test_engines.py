"""Both engines against the model itself, before and after weights are pushed."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, Qwen2Config, Qwen2ForCausalLM

from gkd.actor.collate import collate
from gkd.cluster.workers.environment import environment
from gkd.config import Rollout, Weights
from gkd.data.model_info import ModelInfo
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.planning.memory.cache import kv_bytes
from gkd.planning.memory.pools import pool_memory
from gkd.types import Prompt, Sample, SampleRequest, Sampling, ScoredSample
from tests.planning.layouts import layout_of
from tests.weights.received import load_in_buckets

EOS = 1
N_TOKENS = 90  # of 96 rows; the others are padding
SHAPE = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 96,
    "max_position_embeddings": 128,
    "eos_token_id": EOS,
    "bos_token_id": 0,
}


def make(tied: bool, seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    model = (
        Qwen2ForCausalLM(Qwen2Config(**SHAPE, tie_word_embeddings=True))
        if tied
        else LlamaForCausalLM(LlamaConfig(**SHAPE))
    )
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(3)
    return model.float().eval()


def small_spec(path: str, *, transfer: str = "object_store", stateful: bool = False) -> EngineSpec:
    """Few tokens a step, so that prompts compete for them: on a CPU a seeded prompt must never be split."""
    model = ModelInfo(SHAPE["vocab_size"], SHAPE["max_position_embeddings"], [EOS], N_TOKENS, stateful)
    weights = Weights(transfer=transfer)
    return EngineSpec(
        "rollout", path, model, Rollout(), "cpu", "float32", 64, weights=weights, max_num_batched_tokens=128
    )


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def pair(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A vLLM and an hf engine of the same model."""
    os.environ.update(environment("cpu", []))
    from gkd.inference.hf import HFSampler
    from gkd.inference.vllm_sampler import VLLMSampler

    path = str(tmp_path_factory.mktemp("model"))
    model = make(request.param, seed=0)
    model.save_pretrained(path)
    vllm = VLLMSampler(small_spec(path))
    yield {
        "vllm": vllm,
        "hf": HFSampler(small_spec(path)),
        "model": model,
        "tied": request.param,
        "path": path,
    }
    vllm.close()


def requests(sampling: Sampling, n: int = 9) -> list[SampleRequest]:
    rng = np.random.default_rng(0)
    return [
        SampleRequest(Prompt(i, rng.integers(2, N_TOKENS, 3 + i).astype(np.int32), ""), 0, 100 + i, sampling)
        for i in range(n)
    ]


def run(engine: InferenceEngine[SampleRequest, Sample], sample_requests: list[SampleRequest]) -> list[Sample]:
    for key, request in enumerate(sample_requests):
        engine.add(key, request)
    samples: dict[int, Sample] = {}
    while engine.has_unfinished_requests():
        samples |= dict(engine.step())
    return [samples[key] for key in sorted(samples)]


def worst_difference(model: torch.nn.Module, sample_requests: list[SampleRequest], samples: list[Sample]) -> float:
    """Largest |log p| between what the engine said of its tokens and the model's own softmax(logits / T)."""
    worst = 0.0
    for request, finished in zip(sample_requests, samples, strict=True):
        prompt = request.prompt.token_ids
        ids = torch.from_numpy(finished.token_ids.astype(np.int64))
        assert np.array_equal(ids[: len(prompt)], prompt)
        with torch.no_grad():
            logits = model(ids[None]).logits[0, len(prompt) - 1 : -1].float()
        logits[:, N_TOKENS:] = -torch.inf
        own = (logits / request.sampling.temperature).log_softmax(-1)
        own = own.gather(-1, ids[len(prompt) :, None])[:, 0].numpy()
        worst = max(worst, float(np.abs(own - finished.sampled_logprobs).max()))
    return worst


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_logprobs_are_those_of_what_was_sampled_from(pair, name: str, temperature: float) -> None:
    sample_requests = requests(Sampling(12, temperature))
    samples = run(pair[name], sample_requests)
    assert len(samples) == len(sample_requests)
    assert worst_difference(pair["model"], sample_requests, samples) < 2e-4
    for finished in samples:
        ended = finished.finish_reason == "stop"
        assert ended == (finished.sampled_ids[-1] == EOS)  # the end token is part of the response
        assert EOS not in finished.sampled_ids[:-1]
        assert finished.sampled_ids.max() < N_TOKENS
        assert ended or len(finished.sampled_ids) == 12
        assert len(finished.sampled_logprobs) == len(finished.sampled_ids)


def test_more_prompts_than_fit_into_one_step(pair) -> None:
    rng = np.random.default_rng(1)
    prompts = [Prompt(i, rng.integers(2, N_TOKENS, 50).astype(np.int32), "") for i in range(20)]
    sample_requests = [SampleRequest(p, 0, 7 + p.id, Sampling(8)) for p in prompts]
    samples = run(pair["vllm"], sample_requests)
    assert worst_difference(pair["model"], sample_requests, samples) < 2e-4


def test_vllm_makes_an_output_of_a_request_once(pair, monkeypatch: pytest.MonkeyPatch) -> None:
    """One for every running request at every step would be twice the work of the host."""
    outputs, engine = [], pair["vllm"].llm_engine
    step = engine.step
    monkeypatch.setattr(engine, "step", lambda: [outputs.append(output) or output for output in step()])
    sample_requests = requests(Sampling(10))
    assert len(run(pair["vllm"], sample_requests)) == len(outputs) == len(sample_requests)


def test_both_engines_decode_greedily_to_the_same_tokens(pair) -> None:
    sample_requests = requests(Sampling(10, temperature=0.0))
    for a, b in zip(run(pair["vllm"], sample_requests), run(pair["hf"], sample_requests), strict=True):
        assert a.token_ids.tolist() == b.token_ids.tolist()
        assert a.finish_reason == b.finish_reason


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_equal_seeds_give_equal_samples_whatever_runs_beside_them(pair, name: str) -> None:
    sample_requests = requests(Sampling(12))
    together = run(pair[name], sample_requests)
    alone = [run(pair[name], [request])[0] for request in sample_requests]
    assert [f.token_ids.tolist() for f in together] == [f.token_ids.tolist() for f in alone]


def test_a_prompt_that_is_too_long_is_refused_and_the_engine_lives_on(pair) -> None:
    long = SampleRequest(Prompt(0, np.full(300, 5, dtype=np.int32), ""), 0, 0, Sampling(4))
    for name in ("vllm", "hf"):
        with pytest.raises(ValueError, match=r"\d+"):
            pair[name].add(long.key, long)
        assert len(run(pair[name], requests(Sampling(3), n=2))) == 2


def test_an_engine_holds_what_was_planned(pair) -> None:
    """The weights that it reads, its cache, and the sequences that vLLM's own blocks hold, within 15 %."""
    planned_for = layout_of(
        "+recipe=grpo", f"model.path={pair['path']}", "placement=cpu", "data.max_prompt_length=32",
        "rollout.max_response_length=32", on_cpu=True,
    )  # fmt: skip
    planned = pool_memory(planned_for, "rollout", planned_for.config.rollout)
    # Not of the engine's parameters: on a CPU vLLM packs the layers' matrices away from them.
    weights = sum(tensor.nbytes for tensor in load_file(f"{pair['path']}/model.safetensors").values())
    config = pair["vllm"].llm_engine.vllm_config
    tokens = config.cache_config.num_gpu_blocks * config.cache_config.block_size
    assert planned.items["weights"] == pytest.approx(weights, rel=0.15)
    assert planned.items["key-value cache"] == pytest.approx(
        tokens * kv_bytes(planned_for.models.student, 1, 4), rel=0.15
    )
    held = int(planned.notes[0].split("holds ")[1].split(" ")[0].replace(",", ""))
    assert held == pytest.approx(tokens / 64, rel=0.15)


LETTERS = ["?", "!", "a", "b", "c", *(chr(0x4E00 + i) for i in range(5, SHAPE["vocab_size"]))]
STOPS = ("ab", *LETTERS[4:14])
SPECIAL = STOPS[1:6]


def letters_tokenizer() -> Any:
    """Writes token i as LETTERS[i], without spaces between them."""
    tokenizer = Tokenizer(models.WordLevel({letter: i for i, letter in enumerate(LETTERS)}, unk_token="?"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split("", "isolated")
    tokenizer.decoder = decoders.Fuse()
    special = {"unk_token": "?", "eos_token": "!", "additional_special_tokens": list(SPECIAL)}
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


SHAPED = [{"top_k": 5}, {"min_p": 0.2}, {"presence_penalty": 1.5}, {"top_p": 0.7, "top_k": 20, "min_p": 0.02}]


@pytest.mark.parametrize("how", [*SHAPED, {"top_k": 9, "presence_penalty": -1.0}], ids=str)
@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_truncation_and_penalty_are_those_of_the_trainer(pair, name: str, how: dict[str, Any]) -> None:
    """Log-probabilities of an engine are those that the loss computes for the tokens that it sampled."""
    from gkd.losses.policy import token_logprobs

    sample_requests = requests(Sampling(12, 0.8, **how))
    samples = run(pair[name], sample_requests)
    micro = collate([ScoredSample(sample) for sample in samples], None, [1.0] * len(samples), [0.0] * len(samples))
    rows = []
    for sample in samples:
        ids = torch.from_numpy(sample.token_ids.astype(np.int64))
        with torch.no_grad():
            rows.append(pair["model"](ids[None]).logits[0, len(sample.request.prompt.token_ids) - 1 : -1].float())
    logits = torch.cat(rows)
    logits[:, N_TOKENS:] = -torch.inf
    own = token_logprobs(logits, 0, micro, Rollout(n=2, temperature=0.8, **how))
    assert (own - micro.sampler_logprobs).abs().max() < 2e-4
    assert (token_logprobs(logits, 0, micro) - micro.sampler_logprobs).abs().max() > 1e-2  # it does change them


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_after_a_push_the_engine_is_the_pushed_model(pair, name: str) -> None:
    """Which the engines stay: the last test of them."""
    sample_requests = requests(Sampling(12))
    run(pair[name], sample_requests)  # fills the prefix cache with the old weights
    for version, seed in ((1, 7), (2, 8)):
        pushed = make(pair["tied"], seed)
        state = {n: t for n, t in pushed.state_dict().items() if not (pair["tied"] and n == "lm_head.weight")}
        load_in_buckets(pair[name], state.items(), version)
        samples = run(pair[name], sample_requests)
        assert {span.version for sample in samples for span in sample.versions} == {version}
        assert worst_difference(pushed, sample_requests, samples) < 2e-4
        assert worst_difference(pair["model"], sample_requests, samples) > 0.1  # the old weights would not have passed


@pytest.mark.parametrize("name", ["vllm", "hf"])
def test_texts_end_a_response_which_has_them(name: str, tmp_path: Any) -> None:
    """Tokens are single letters, so a text of two goes over two of them; some are special. They are those of a set."""
    os.environ.update(environment("cpu", []))
    from gkd.inference.hf import HFSampler
    from gkd.inference.vllm_sampler import VLLMSampler

    make(tied=False, seed=0).save_pretrained(tmp_path)
    letters_tokenizer().save_pretrained(tmp_path)
    spec = dataclasses.replace(small_spec(str(tmp_path)), stops=STOPS)
    engine: Any = {"vllm": VLLMSampler, "hf": HFSampler}[name](spec)
    try:
        samples = run(engine, requests(Sampling(40, 2.0, stop=STOPS), n=24))
    finally:
        engine.close()
    texts = ["".join(LETTERS[i] for i in sample.sampled_ids if i != EOS) for sample in samples]
    stopped = 0
    for sample, text in zip(samples, texts, strict=True):
        at = min((text.find(s) + len(s) for s in STOPS if s in text), default=None)
        assert at in (None, len(text)), text  # nothing after it
        assert (sample.finish_reason == "stop") == (at is not None or sample.sampled_ids[-1] == EOS)
        stopped += at is not None
    assert stopped >= 3
    assert any(LETTERS[sample.sampled_ids[-1]] in SPECIAL for sample in samples)


@pytest.mark.parametrize(("above", "length", "place"), [(20, 69, "session"), (20, 70, "above"), (70, 90, "elsewhere")])
def test_sockets_of_an_engine_lie_with_rays_files_where_their_names_are_short_enough(
    above: int, length: int, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In its session, or above, as on a cluster. Linux takes 107 characters, of which a UUID and a slash are 37."""
    from vllm.utils.network_utils import get_open_zmq_ipc_path
    from vllm.v1.executor import multiproc_executor, uniproc_executor

    from gkd.inference.vllm_environment import meet_in_session

    parent = "/" + "r" * (above - 1)
    directory = f"{parent}/{'s' * (length - above - 1)}"
    monkeypatch.setenv("VLLM_RPC_BASE_PATH", "/elsewhere")
    for executor in (multiproc_executor, uniproc_executor):
        monkeypatch.setattr(executor, "get_file_store_init_method", executor.get_file_store_init_method)
    node = SimpleNamespace(get_session_dir_path=lambda: directory)
    monkeypatch.setattr("ray._private.worker._global_node", node)
    meet_in_session()
    path = get_open_zmq_ipc_path().removeprefix("ipc://")
    assert path.rpartition("/")[0] == {"session": directory, "above": parent, "elsewhere": "/elsewhere"}[place]
    assert len(path) < 107
    assert multiproc_executor.get_file_store_init_method().startswith(f"file://{directory}/")

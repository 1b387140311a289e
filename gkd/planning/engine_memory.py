"""Memory of one GPU of a vLLM engine: rollout, teacher, reference; and how many sequences its cache holds.

vLLM takes ``gpu_memory_utilization`` of a card: weights, the largest activations of a step, CUDA graphs, and all that
is left for the key-value cache. What this project adds lies outside that share (gkd.inference, gkd.weights).
"""

from __future__ import annotations

from gkd.config import Engine, Rollout, Scorer
from gkd.planning.cards import GIB
from gkd.planning.items import GB, GroupMemory
from gkd.planning.shape import ModelShape
from gkd.planning.subject import Subject

BLOCK = 16  # tokens of a block of vLLM's cache on a GPU
CONTEXT, GRAPHS = 0.6 * GIB, 0.5 * GIB  # CUDA's context with kernels, and captured graphs: as seen with such models
PROCESS = 1.2 * GIB  # an engine's process on a CPU: Python, torch and vLLM
PROMPT_ROWS = 1024  # prompt rows whose log-probabilities vLLM computes at a time on a GPU
RESULT_BYTES, LOGIT_BYTES, ROW_BYTES, ENTRY_BYTES = 2 * GIB, GIB, 2 * GIB, 12  # gkd.inference.vllm_scorer
F32 = 4


def engine_memory(subject: Subject, group: str, engine: Engine) -> GroupMemory:
    """One GPU (on a CPU: one engine) of ``group``, whose pool is ``engine``."""
    if subject.card.is_cpu:
        return _on_cpu(subject, group, engine)
    shape, card, tp, c = subject.models.of(group), subject.card, engine.tensor_parallel_size, subject.compute
    if isinstance(engine, Rollout) and engine.engine == "hf":
        return _hf(subject, engine)
    weights = c * shape.n_parameters / tp
    step = _step_bytes(shape, engine, card.memory, c)
    graphs = CONTEXT + (0 if engine.enforce_eager else GRAPHS)
    budget = engine.gpu_memory_utilization * card.memory
    cache = budget - weights - step - graphs
    items = {
        "weights": weights,
        "activations of a step": step,
        "context, CUDA graphs": graphs,
        "key-value cache": max(0.0, cache),
    }
    if isinstance(engine, Scorer):
        rows = min(PROMPT_ROWS, subject.work().longest)
        items["logits of prompt rows"] = float(rows * shape.vocabulary * (c + 2 * F32))
        a_token = 2 * ENTRY_BYTES * (_top_k(subject, group, shape) + 1)
        items["top K of prompt rows"] = float(min(_step_tokens(card.memory) * a_token, max(ROW_BYTES, 256 * a_token)))
    else:
        items["weights being received"] = c * (shape.largest_layer / tp + shape.largest_weight)
    longest = subject.work().longest
    held = int(max(0.0, cache) // (kv_bytes(shape, tp, c) * _rounded(longest)))
    lack = ""
    if shape.heads % tp:
        lack = f"tensor_parallel_size={tp} does not divide {shape.heads} attention heads"
    elif held < 1:
        lack = f"{(kv_bytes(shape, tp, c) * longest - cache) / GB:.1f} GB short of one sequence's cache"
    return GroupMemory(group, engine.n_workers, items, card.memory, lack, _notes(held, longest, engine))


def sequences_held(subject: Subject, group: str, engine: Engine) -> int:
    """Sequences of the mean length that an engine works on at the same time: its cache's, at most max_num_seqs."""
    work, shape, c = subject.work(), subject.models.of(group), subject.compute
    cache = engine_memory(subject, group, engine).items.get("key-value cache", 0.0)
    a_sequence = kv_bytes(shape, engine.tensor_parallel_size, c) * _rounded(work.prompt + work.response)
    return max(1, min(engine.max_num_seqs, int(cache // a_sequence)))


def kv_bytes(shape: ModelShape, tp: int, c: int) -> int:
    """Bytes one token has in the cache of one GPU. With more GPUs than key-value heads these are repeated."""
    heads = max(1, -(-shape.kv_heads // tp))
    return 2 * shape.n_layers * heads * shape.head_dim * c


def _rounded(length: int) -> int:
    return -(-length // BLOCK) * BLOCK


def _step_bytes(shape: ModelShape, engine: Engine, memory: float, c: int) -> float:
    """Activations of the largest step vLLM measures itself with: its default budget of tokens, and sampling."""
    tokens = _step_tokens(memory)
    width = max(layers.width for layers in shape.layers)
    a_token = c * (3 * shape.hidden + 3 * width / engine.tensor_parallel_size)
    return tokens * a_token + engine.max_num_seqs * shape.vocabulary * (c + 2 * F32)


def _step_tokens(memory: float) -> int:
    """Tokens of a step, as vLLM chooses them by the memory of the card."""
    return 16384 if memory >= 70 * GIB else 8192


def _top_k(subject: Subject, group: str, shape: ModelShape) -> int:
    """The largest K that a group that scores is asked for."""
    return max(subject.work().top_k, min(subject.config.data.val_top_k, shape.vocabulary)) if group == "teacher" else 0


def _notes(held: int, longest: int, engine: Engine) -> tuple[str, ...]:
    text = f"the cache holds {held:,} sequences of {longest:,} tokens; max_num_seqs={engine.max_num_seqs}"
    return (text if held >= engine.max_num_seqs else f"{text}: long ones would wait",)


def _hf(subject: Subject, engine: Rollout) -> GroupMemory:
    """transformers' generate: a cache for every sequence of a batch at full length, and their logits in float32."""
    shape, c, work = subject.models.student, subject.compute, subject.work()
    batch = min(engine.max_num_seqs, work.samples)
    items = {
        "weights": float(c * shape.n_parameters),
        "key-value cache": float(batch * work.longest * kv_bytes(shape, 1, c)),
        "logits": float(3 * batch * shape.vocabulary * F32),
        "process": PROCESS if subject.card.is_cpu else CONTEXT,
    }
    return GroupMemory("rollout", engine.n_workers, items, subject.card.memory)


def _on_cpu(subject: Subject, group: str, engine: Engine) -> GroupMemory:
    if isinstance(engine, Rollout) and engine.engine == "hf":
        return _hf(subject, engine)
    shape, work, c = subject.models.of(group), subject.work(), subject.compute
    items = {
        "weights": float(c * shape.n_parameters),
        "key-value cache": float(engine.kv_cache_gb * GIB),
        "process": PROCESS,
    }
    if isinstance(engine, Scorer):
        fitting = LOGIT_BYTES // (F32 * shape.vocabulary)
        tokens = max(engine.max_num_seqs, 256, min(4096, fitting))
        items["logits"] = float(2 * min(tokens, engine.max_num_seqs * work.longest) * shape.vocabulary * F32)
        k = _top_k(subject, group, shape)
        running = min(engine.max_num_seqs, work.samples)
        items["results"] = float(min(RESULT_BYTES, running * work.longest * (k + 1) * 8))
    held = engine.kv_cache_gb * GIB // (kv_bytes(shape, 1, c) * work.longest)
    lack = "" if held else f"kv_cache_gb={engine.kv_cache_gb} holds no sequence of {work.longest:,} tokens"
    return GroupMemory(group, engine.n_workers, items, subject.card.memory, lack, _notes(held, work.longest, engine))

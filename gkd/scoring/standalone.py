"""A teacher outside the cluster: one engine on this machine's GPUs, served until a signal ends it."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

from gkd.cluster.session.port import find_bind_error
from gkd.cluster.session.shutdown import ServerStop
from gkd.cluster.workers.environment import allocate_by, environment
from gkd.cluster.workers.heap import freeze_heap
from gkd.config import Config, Teacher
from gkd.config.device import installed_device
from gkd.data.answers import template_end, with_turn_end
from gkd.data.model_info import ModelInfo, fingerprint_weights
from gkd.data.rendering import Rendering
from gkd.data.tokenizer import check_causal_lm, load_tokenizer, tokenizer_hash
from gkd.errors import ConfigError
from gkd.inference.engine import EngineSpec, InferenceEngine
from gkd.inference.vllm_models import SCORER_REMEDY, require_quantization, require_vllm_runs, scoring_engine
from gkd.scoring.address import Key, endpoint, key_path
from gkd.scoring.server import ScoringServer


def serve(config: Config, stop: ServerStop) -> int:
    """Serve ``config.teacher`` until ``stop``; returns the exit code. Raises ConfigError for what cannot be served."""
    teacher = config.teacher
    path, host, port = _require_one_engine(teacher), teacher.server_ip or "127.0.0.1", teacher.server_port
    path_of_key = key_path(teacher, [host])
    key = Key.load_or_create(path_of_key)
    if reason := find_bind_error(host, port):  # sooner than after loading a model
        raise ConfigError(f"the teacher cannot listen on {endpoint(host, port)}: {reason}")
    directory = check_causal_lm(path, "teacher.model.path")
    teacher = teacher.model_copy(update={"engine": scoring_engine(teacher, directory)})
    if teacher.engine_class.needs_vllm:
        require_vllm_runs(directory, "teacher.model.path", SCORER_REMEDY)
        require_quantization(teacher.quantization, "teacher.quantization")
    tokenizer = load_tokenizer(directory, "teacher.model.path")
    digest = tokenizer_hash(tokenizer)
    spec = _engine_spec(config, teacher, directory, tokenizer)
    print(f"loading the teacher in {directory} ...", file=sys.stderr, flush=True)
    engine = teacher.engine_class(spec)
    try:
        if stop.event.is_set():  # libraries that load a model swallow a SystemExit that finds them in a cleanup
            return stop.code
        rendering, weights = Rendering.from_tokenizer(tokenizer), fingerprint_weights(directory)
        server = ScoringServer(engine, digest, host, port, key, rendering=rendering, weights=weights)
        _announce(server, engine, path, path_of_key)
        freeze_heap()
        stop.serving = True
        server.serve(stop.event)
    finally:
        engine.close()
    return stop.code


def _require_one_engine(teacher: Teacher) -> str:
    """Return the path of the model that is to be served. Raises ConfigError for settings that no server has."""
    if teacher.model.path is None:
        raise ConfigError("teacher.model.path is missing: which model is to be served?")
    if teacher.n_workers > teacher.tensor_parallel_size:
        raise ConfigError(
            f"a server has one engine of teacher.tensor_parallel_size={teacher.tensor_parallel_size} GPUs, and "
            f"{teacher.n_workers} are requested: start one server for each engine, on ports of their own"
        )
    if teacher.chat_template is not None:
        raise ConfigError("teacher.chat_template is for runs: a server has that of its model's tokenizer")
    if teacher.nodes_an_engine > 1:
        raise ConfigError("a server's engine is on one machine: teacher.across_nodes is for a run's own teachers")
    return teacher.model.path


def _engine_spec(config: Config, teacher: Teacher, directory: str, tokenizer: Any) -> EngineSpec:
    """Return what the engine is built from, on the device of the installed packages, whose variables are set."""
    model = ModelInfo.read(directory, "teacher.model.path", tokenizer)
    model = with_turn_end(model, template_end(tokenizer))
    device = installed_device()
    variables = environment(device, [directory], config.cluster.cpu_threads)
    os.environ.update(variables)
    allocate_by(variables)
    return EngineSpec("teacher", directory, model, teacher, device, config.model.dtype_on(device))


def _announce(server: ScoringServer, engine: InferenceEngine[Any, Any], path: str, path_of_key: Path) -> None:
    limits = engine.limits
    print(
        f"teacher ready at {server.address}: {path}, K up to {limits.max_top_k} of {limits.vocabulary}, "
        f"sequences up to {limits.max_length} tokens, key in {path_of_key}",
        flush=True,
    )

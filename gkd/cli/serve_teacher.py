"""Serve a teacher outside the cluster: ``gkd serve-teacher teacher.model.path=DIR teacher.server_port=15555``.

Runs use it with ``teacher.server_ip=HOST``. It listens on 127.0.0.1 unless ``teacher.server_ip`` says otherwise. Only
clients with its key are answered. On loopback that is in ``~/.cache/gkd/teacher.key``; any other address needs
``teacher.key_file``, of which clients need a copy. Either is made when it does not exist. One engine on the GPUs this
process sees. SIGTERM and SIGHUP end it with exit code 0, Ctrl-C with 130.
"""

from __future__ import annotations

import argparse
import os
import signal
import sys
import threading
from collections.abc import Sequence
from types import FrameType
from typing import TYPE_CHECKING

from gkd.cluster.shutdown import handle_ending_signals
from gkd.errors import ConfigError, Parser, entry_point

if TYPE_CHECKING:
    from gkd.config import Config

# A run names its student and its data together with its teacher; a server has neither.
_DEFAULTS = ("model.path=none", "data.train_files=[none]", "data.val_files=[none]")


@entry_point
def main(arguments: Sequence[str]) -> int:
    """Serve until a signal; returns the exit code."""
    parser = Parser("gkd serve-teacher", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("overrides", nargs="*", help="as for gkd train; gkd settings teacher lists those of a teacher")
    overrides = parser.parse_args(arguments).overrides
    stop = _Stop()
    return _serve(compose_server(overrides), stop)


def compose_server(overrides: Sequence[str]) -> Config:
    """Compose the configuration of a server, whose own defaults come below those of a file among the overrides."""
    from gkd.config.compose import compose
    from gkd.config.loading import read_yaml

    sections = [read_yaml(o).get("teacher") for o in overrides if "=" not in o and o.endswith((".yaml", ".yml"))]
    has_address = any(isinstance(teacher, dict) and teacher.get("server_ip") for teacher in sections)
    return compose([*_DEFAULTS, *([] if has_address else ["teacher.server_ip=127.0.0.1"]), *overrides])


def _serve(config: Config, stop: _Stop) -> int:
    from gkd.inference.vllm_environment import environment, installed_device
    from gkd.scoring.address import Key, key_path

    teacher = config.teacher
    path, host, port = teacher.model.path, teacher.server_ip or "127.0.0.1", teacher.server_port
    if path is None:
        raise ConfigError("teacher.model.path is missing: which model is to be served?")
    if teacher.n_workers > teacher.tensor_parallel_size:
        raise ConfigError(
            f"a server has one engine of teacher.tensor_parallel_size={teacher.tensor_parallel_size} GPUs, and "
            f"{teacher.n_workers} are asked for: start one server for each engine, on ports of their own"
        )
    if teacher.chat_template is not None:
        raise ConfigError("teacher.chat_template is for runs: a server says what its model's tokenizer has")
    if teacher.nodes_an_engine > 1:
        raise ConfigError("a server's engine is on one machine: teacher.across_nodes is for a run's own teachers")
    path_of_key = key_path(teacher, [host])
    key = Key.load_or_create(path_of_key)
    _require_free(host, port)
    from gkd.data.answers import template_end, with_turn_end
    from gkd.data.model_info import ModelInfo
    from gkd.data.rendering import Rendering
    from gkd.data.tokenizer import check_causal_lm, load_tokenizer, tokenizer_hash
    from gkd.inference.choice import scoring_engine
    from gkd.inference.engine import EngineSpec
    from gkd.inference.vllm_models import SCORER_REMEDY, require_quantization, require_vllm_runs
    from gkd.scoring.server import ScoringServer

    directory = check_causal_lm(path, "teacher.model.path")
    teacher = teacher.model_copy(update={"engine": scoring_engine(teacher, directory)})
    if teacher.engine_class.needs_vllm:
        require_vllm_runs(directory, "teacher.model.path", SCORER_REMEDY)
        require_quantization(teacher.quantization, "teacher.quantization")
    tokenizer = load_tokenizer(directory, "teacher.model.path")
    model = ModelInfo.read(directory, "teacher.model.path", tokenizer)
    model = with_turn_end(model, template_end(tokenizer))
    digest = tokenizer_hash(tokenizer)
    device = installed_device()
    os.environ.update(environment(device, [directory], config.cluster.cpu_threads))
    print(f"loading the teacher in {directory} ...", file=sys.stderr, flush=True)
    engine = teacher.engine_class(EngineSpec(directory, model, teacher, device, config.model.dtype_on(device)))
    try:
        if stop.event.is_set():  # libraries that load a model swallow a SystemExit that finds them in a cleanup
            return stop.code
        server = ScoringServer(engine, digest, host, port, key, rendering=Rendering.of(tokenizer))
        limits = engine.limits
        print(
            f"teacher ready at {server.address}: {path}, K up to {limits.max_top_k} of {limits.vocabulary}, "
            f"sequences up to {limits.max_length} tokens, key in {path_of_key}",
            flush=True,
        )
        stop.serving = True
        server.serve(stop.event)
    finally:
        engine.close()
    return stop.code


class _Stop:
    """Turns signals into the end of the server: at once while it loads, in good order once it serves."""

    def __init__(self) -> None:
        self.event, self.serving, self.code = threading.Event(), False, 0
        handle_ending_signals(self._on_signal)
        self._report = sys.unraisablehook
        sys.unraisablehook = self._unless_ending

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self.code = 130 if number == signal.SIGINT else 0
        self.event.set()
        if not self.serving:
            raise SystemExit(self.code)

    def _unless_ending(self, unraisable: sys.UnraisableHookArgs) -> None:
        """Leave out a SystemExit that finds a finalizer: it is lost there, and the end comes after the model's."""
        if not (self.event.is_set() and unraisable.exc_type is SystemExit):
            self._report(unraisable)


def _require_free(host: str, port: int) -> None:
    """Raise ConfigError when ``host:port`` cannot be listened on: sooner than after loading a model."""
    from gkd.cluster.port import why_taken
    from gkd.scoring.address import endpoint

    if reason := why_taken(host, port):
        raise ConfigError(f"the teacher cannot listen on {endpoint(host, port)}: {reason}")

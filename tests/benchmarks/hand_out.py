#!/usr/bin/env python
"""Handing out a batch: the driver's seconds to choose engines, and what goes to these.

    python tests/benchmarks/hand_out.py [--engines 256] [--requests 8192] [--samples 8] [--prompt 1000] [--rounds 5]

Prints a line of JSON: the seconds to queue all requests and to choose an engine for each, the least of several rounds;
the seconds to pickle what every engine is given, as Ray does; and its bytes, beside those of the prompts' tokens.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from dataclasses import replace
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

import numpy as np
from ray import cloudpickle

from gkd.rollout.dispatch import RequestDispatcher
from gkd.types import Prompt, SampleRequest, Sampling


def requests(n: int, samples: int, length: int) -> list[SampleRequest]:
    """Return ``samples`` requests a prompt of ``length`` tokens, ``n`` in all."""
    sampling = Sampling(512)
    prompts = [Prompt(p, np.full(length, p, np.int32), "question " * (length // 2)) for p in range(n // samples)]
    sample_requests = [SampleRequest(prompt, i, 0, sampling) for prompt in prompts for i in range(samples)]
    return [replace(request, key=key) for key, request in enumerate(sample_requests)]


def main() -> None:
    """Run and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("engines", 256), ("requests", 8192), ("samples", 8), ("prompt", 1000), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=default)
    options = parser.parse_args()
    sample_requests = requests(options.requests, options.samples, options.prompt)
    chosen_s = pickled_s = math.inf
    for _ in range(options.rounds):
        began = time.perf_counter()
        dispatcher = RequestDispatcher(range(options.engines), len(sample_requests), options.samples)
        dispatcher.add(sample_requests)
        assignment = dispatcher.hand_out()
        chosen_s = min(chosen_s, time.perf_counter() - began)
        began = time.perf_counter()
        messages = [cloudpickle.dumps(its) for its in assignment.values()]
        pickled_s = min(pickled_s, time.perf_counter() - began)
    prompts = {request.prompt.id: request.prompt for request in sample_requests}.values()
    tokens = sum(prompt.token_ids.nbytes + len(prompt.text) for prompt in prompts)
    most = max(len(its) for its in assignment.values())
    figures = {"choose_s": chosen_s, "pickle_s": pickled_s, "mb": sum(map(len, messages)) / 1e6}
    figures |= {"prompts_mb": tokens / 1e6, "most_an_engine": most}
    print(json.dumps({**vars(options), **{name: float(f"{value:.4g}") for name, value in figures.items()}}))


if __name__ == "__main__":
    main()

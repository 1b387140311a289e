"""The checks of the acceptance run, in the order in which most is learnt soonest.

First whether the documented command runs at all; then its parts, what it runs with and how fast; then what memory and
other settings change. Every run checks by itself which worker has which GPU.

A check is a function of a :class:`tests.gpu.checks.context.Context` in a process of its own. It notes figures as it
goes and raises AssertionError for what is not as it must be. Nothing here imports torch or vLLM.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Check:
    """One check: ``target`` is ``package.module:function``.

    ``estimate_s`` is about what it takes on one H100 with packages that have bytecode, ``limit_s`` after how long it is
    ended. ``n_gpus`` it needs; ``rehearses``: a part of it runs without any; ``on_request``: it runs only where
    ``--only`` names it. The first ones read vLLM from a disk that nobody has read yet.
    """

    name: str
    target: str
    estimate_s: int
    limit_s: int
    n_gpus: int = 1
    rehearses: bool = True
    on_request: bool = False


CHECKS = (
    Check("versions", "tests.gpu.checks.machine:versions", 27, 120),
    Check("eager", "tests.gpu.checks.runs:eager", 42, 180),
    Check("attention", "tests.gpu.checks.attention:packed_against_padded", 14, 90),
    Check("two_gpus", "tests.gpu.checks.runs:two_gpus", 100, 240, n_gpus=2),  # what has never run comes early
    Check("ipc", "tests.gpu.checks.ipc:pushes", 8, 60),
    Check("moments", "tests.gpu.checks.moments:against_adamw", 8, 60),
    Check("assignment", "tests.gpu.checks.machine:assignment", 12, 60),
    Check("graphs", "tests.gpu.checks.runs:graphs", 47, 150),
    Check("compiled", "tests.gpu.checks.compiled:layers", 37, 120),
    Check("w1", "tests.gpu.checks.w1:against_trl", 150, 240),
    Check("teacher_rows", "tests.gpu.checks.teacher:rows", 35, 150),
    Check("colocation", "tests.gpu.checks.runs:colocation", 41, 120),
    Check("transfers", "tests.gpu.checks.runs:transfers", 35, 150),
    Check("little_memory", "tests.gpu.checks.runs:little_memory", 35, 120),
    Check("ahead", "tests.gpu.checks.runs:ahead", 42, 120),
    Check("out_of_memory", "tests.gpu.checks.out_of_memory:update_again", 37, 90),
    Check("curve", "tests.gpu.checks.runs:curve", 110, 300),
    Check("ranks_memory", "tests.gpu.checks.out_of_memory:update_again_of_two", 60, 240, n_gpus=2, rehearses=False),
    Check("shards", "tests.gpu.checks.runs:shards", 120, 300, n_gpus=2),
    Check("update_profile", "tests.gpu.checks.profile:update_and_score", 50, 120, on_request=True),
    Check("sampling_profile", "tests.gpu.checks.profile:sampling", 110, 200, on_request=True),
    Check("w1_ahead", "tests.gpu.checks.w1:ahead", 130, 240, on_request=True),
    Check("host_weights", "tests.gpu.checks.runs:host_weights", 45, 150, on_request=True),
    Check("mps", "tests.gpu.checks.mps:beside_each_other", 150, 400, rehearses=False, on_request=True),
)

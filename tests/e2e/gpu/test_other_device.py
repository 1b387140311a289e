"""What a GPU would run, beside the host: with the host's figures, and no tensor where it must not be."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

NOTICES = """
import torch
from tests.gpu import other_device
other_device.set_up()
with other_device.entered():
    on = torch.arange(3.0).to("cuda")
    try:
        on + torch.ones(3)
    except RuntimeError:
        print("apart")
    copy = on.to("cpu", non_blocking=True)
    early = copy.isnan().all().item()
    torch.cuda.Event().synchronize()
    print(early, copy.tolist())
"""


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    here = Path(__file__).parents[3]
    return subprocess.run(
        [sys.executable, *arguments], check=False, cwd=here, capture_output=True, text=True, timeout=300
    )


def test_a_tensor_of_the_host_and_one_of_the_device_do_not_mix_and_copies_come_late() -> None:
    done = run("-c", NOTICES)
    assert done.stdout.splitlines() == ["apart", "True [0.0, 1.0, 2.0]"], done.stderr


def test_what_runs_on_a_gpu_runs_beside_the_host_with_the_same_figures() -> None:
    done = run("-m", "tests.gpu.on_other_device")
    rows = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    assert done.returncode == 0 and all(row["ok"] for row in rows), done.stderr[-2000:]
    assert sum(row["figures"] for row in rows) > 100
    assert {"scores", "samples", "distill", "bfloat16", "lora", "offload", "ranks"} <= {row["check"] for row in rows}

"""What the machine has: versions, imports, doctor, and which worker gets which GPU."""

from __future__ import annotations

import importlib
import json
import pkgutil
import subprocess
import sys
from pathlib import Path

from tests.gpu.checks.context import Context, require

ROOT = Path(__file__).parents[3]


def versions(context: Context) -> None:
    """Doctor finds nothing wrong, every module of gkd can be imported, and Triton builds a kernel and runs it."""
    doctor = subprocess.Popen(
        [sys.executable, "-m", "gkd.doctor"], cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )
    import gkd

    broken, modules = {}, [each.name for each in pkgutil.walk_packages(gkd.__path__, "gkd.")]
    for name in modules:  # meanwhile: both read the same packages from the disk
        if not name.endswith("__main__"):
            try:
                importlib.import_module(name)
            except BaseException as error:
                broken[name] = f"{type(error).__name__}: {error}"[:200]
    printed = doctor.communicate(timeout=120)[0]
    print(printed)
    wrong = [line for line in printed.splitlines() if line.startswith(("failed", "warning"))]
    context.note(doctor=wrong)
    import torch

    context.note(modules=len(modules), broken=broken, cuda=torch.version.cuda)
    if not context.rehearsal:
        context.note(_gpu())
    require(not broken, f"modules that cannot be imported: {broken}")
    require(doctor.returncode == 0, f"gkd.doctor: {wrong or printed[-300:]}")


def _gpu() -> dict[str, object]:
    """Facts of the first GPU, a kernel built by Triton, and what copying and multiplying reach."""
    import torch

    result = torch.compile(lambda x: (x.sin() * 2).sum(-1))(torch.ones(64, 512, device="cuda"))
    torch.testing.assert_close(result, torch.full((64,), 512 * 2 * 0.8414710, device="cuda"), rtol=1e-4, atol=1e-3)
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    big = torch.randint(-128, 127, (1 << 30,), dtype=torch.int8, device="cuda")
    copied, multiplied = (_seconds(call) for call in (big.clone, lambda: a @ a))
    return {
        "capability": list(torch.cuda.get_device_capability()),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())),
        "copy_gb_per_s": 2 * big.nbytes / 1e9 / copied,
        "bf16_tflop_per_s": 2 * 8192**3 / 1e12 / multiplied,
        "free_gib": torch.cuda.mem_get_info()[0] / (1 << 30),
    }


def _seconds(call: object) -> float:
    """The median of twenty calls, by events of the GPU."""
    import torch

    times = []
    for _ in range(23):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        call()  # type: ignore[operator]
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3)
    return sorted(times[3:])[10]


def assignment(context: Context) -> None:
    """Three groups on one GPU, which has the UUID that the driver says."""
    from gkd.cluster.gpu import nvml_uuids

    file = context.scratch / "placement.json"
    command = [sys.executable, "launch/verify_gpus.py", "placement=single_gpu", "--json", str(file)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    print(done.stdout, done.stderr)
    require(done.returncode == 0, f"exit code {done.returncode}: {done.stderr.strip()[-300:]}")
    require("GPU Assignments: ['0', '0', '0']" in done.stdout, done.stdout[-300:])
    seen = {uuid for row in json.loads(file.read_text()) for uuid in row["gpu_uuids"]}
    context.note(uuids=sorted(seen))
    if context.rehearsal:
        require(len(seen) == 1 and all(uuid.startswith("SIM-") for uuid in seen), f"simulated: {seen}")
    else:
        require(seen == {nvml_uuids()[0]}, f"workers see {seen}, the driver says {nvml_uuids()}")

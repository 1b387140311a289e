"""What planning loads."""

import subprocess
import sys


def test_planning_loads_neither_ray_nor_torch_nor_vllm():
    check = "import sys, gkd.cluster.gpu; from gkd.cluster.layout import assignment, fit, nodes;"
    check += "sys.exit(bool({'ray', 'torch', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0

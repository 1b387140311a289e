"""What planning loads."""

import subprocess
import sys


def test_planning_loads_neither_ray_nor_torch_nor_vllm():
    check = "import sys, gkd.cluster.gpu, gkd.cluster.layout, gkd.cluster.fit, gkd.cluster.assignment;"
    check += "sys.exit(bool({'ray', 'torch', 'vllm'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", check], timeout=60, check=False).returncode == 0

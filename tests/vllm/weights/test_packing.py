"""NCCL where the build of torch has none."""

from __future__ import annotations

import pytest
import torch

from gkd.config import Weights
from gkd.errors import RunFailed
from gkd.weights import nccl


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has NCCL")
def test_a_build_without_nccl_says_so() -> None:
    with pytest.raises(RunFailed, match=r"weights\.transfer=nccl: NCCL .*only supports CUDA"):
        nccl.NcclSender(Weights(), torch.device("cpu")).new_group()

"""NCCL where the build of torch has none, or an older one than vLLM's own."""

from __future__ import annotations

import ctypes

import pytest
import torch

from gkd.config import Weights
from gkd.errors import RunFailed
from gkd.weights import nccl


@pytest.mark.skipif(torch.version.cuda is not None, reason="this build of torch has NCCL")
def test_a_build_without_nccl_says_so() -> None:
    with pytest.raises(RunFailed, match=r"weights\.transfer=nccl: NCCL .*only supports CUDA"):
        nccl.NcclSender(Weights(), torch.device("cpu")).new_group()


def test_a_library_that_lacks_functions_has_the_others(monkeypatch: pytest.MonkeyPatch) -> None:
    """The C library stands for an NCCL in which nobody can suspend a communicator."""
    from vllm.distributed.device_communicators.pynccl_wrapper import Function, NCCLLibrary

    functions = [Function("abs", ctypes.c_int, [ctypes.c_int]), Function("ncclCommSuspend", ctypes.c_int, [])]
    monkeypatch.setenv("VLLM_NCCL_SO_PATH", "libc.so.6")
    monkeypatch.setattr(NCCLLibrary, "exported_functions", functions)
    monkeypatch.setattr(NCCLLibrary, "path_to_dict_mapping", {})
    library = nccl.load_library()
    assert (library.has_symbol("abs"), library.has_symbol("ncclCommSuspend")) == (True, False)

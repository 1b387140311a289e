"""Settings of python -m gkd.plan, and of the check of memory before a run: the hardware, and the length of texts."""

from __future__ import annotations

from typing import Annotated

from pydantic import Field

from gkd.config.base import Settings

MOST = 1e9  # of GB, TFLOP/s and GB/s: with more, sums leave the range of numbers


class Plan(Settings):
    """The GPU a layout is planned for, and how long texts are. Nothing here changes what a run computes."""

    gpu_type: str | None = Field(
        None, description="the GPU planned for: h200, h100-80gb, a100-40gb, rtx-4090, ...; null: this machine's; where "
        "there is none its CPU if a run here would simulate GPUs (cluster.simulate_gpus), otherwise h100-80gb"
    )  # fmt: skip
    memory_gb: float | None = Field(
        None, gt=0, le=MOST, description="memory of a GPU, 10^9 bytes; null: that of gpu_type"
    )
    tflops: float | None = Field(
        None, gt=0, le=MOST, description="its dense bfloat16 TFLOP/s on paper; null: that of gpu_type"
    )
    memory_bandwidth_gb_s: float | None = Field(
        None, gt=0, le=MOST, description="its memory's bandwidth; null: that of gpu_type"
    )
    link_gb_s: float | None = Field(
        None, gt=0, le=MOST, description="from GPU to GPU of one node, one direction; null: that of gpu_type"
    )
    network_gb_s: float = Field(
        25.0, gt=0, le=MOST, description="between two nodes, one direction, over all their network cards together: "
        "400 of eight cards of 400 Gbit/s"
    )  # fmt: skip
    gpus_per_node: int = Field(8, ge=1, le=1024, description="GPUs of a node, for --best, and where nodes is null")
    nodes: list[Annotated[int, Field(ge=1, le=1024)]] | None = Field(
        None, min_length=1, max_length=8192, description="GPUs of each node there is, for advice; null: as many "
        "nodes of gpus_per_node as it takes"
    )  # fmt: skip
    efficiency: float | None = Field(
        None, gt=0, le=1, description="share of tflops that matrix products reach; null: 0.24, measured on an H200 "
        "with models of 0.5 and 1.5 billion parameters (on a CPU 0.3); larger models reach more"
    )  # fmt: skip
    prompt_length: int | None = Field(None, ge=1, description="mean tokens of a prompt; null: data.max_prompt_length")
    response_length: int | None = Field(
        None, ge=1, description="mean tokens of a response; null: rollout.max_response_length"
    )
    response_spread: float = Field(
        0.5, ge=0, le=3, description="how much responses differ in length, the standard deviation of their lengths' "
        "logarithms; only where response_length is given: otherwise all are as long as the limit"
    )  # fmt: skip
    check: bool = Field(True, description="end a run whose layout cannot fit before anything loads; false: start it")

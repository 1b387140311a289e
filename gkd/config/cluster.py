"""Ray, and the way of the weights between its workers."""

from __future__ import annotations

from typing import Any, ClassVar, Literal

from pydantic import Field

from gkd.config.base import OWN_CLASS, Settings, WaitSeconds
from gkd.config.open import OpenSettings
from gkd.config.registry import EntryName, Registry

MAX_AUTO_SIMULATED_GPUS = 8

TRANSFERS = Registry(
    "weights.transfer",
    {
        "ipc": "gkd.weights.ipc:Ipc",
        "nccl": "gkd.weights.nccl:Nccl",
        "nccl_m2n": "gkd.weights.nccl_m2n:NcclM2n",
        "sharded_rdt": "gkd.weights.sharded_rdt:ShardedRdt",
        "object_store": "gkd.weights.object_store:ObjectStore",
    },
    "gkd.weights.transfer:Transfer",
    undecided="object_store",
)
"""The order in which ``auto`` tries those that it may choose; the last one works everywhere."""


class Weights(OpenSettings):
    """From the actor to the rollout engines, after every step."""

    registry: ClassVar[Registry] = TRANSFERS
    selects: ClassVar[str] = "transfer"

    transfer: EntryName = Field(
        "auto",
        description="way of the weights: ipc: CUDA memory shared by the processes on one GPU; nccl: broadcast from "
        "actor rank 0's GPU to other GPUs; object_store: through Ray, everywhere; auto: the first of these that the "
        "placement allows; nccl_m2n, sharded_rdt: vLLM's own, of shards (docs/weights.md), which auto never takes; "
        f"or {OWN_CLASS} (OpenRLHF: vllm_sync_backend)",
    )
    timeout_s: WaitSeconds = Field(
        300.0, description="time in which no bucket of a push comes or is loaded that ends it"
    )
    checksum: bool = Field(
        False, description="verify every bucket: SHA-256 in the object store, sums of its words by ipc and nccl"
    )
    bucket_mb: int = Field(
        512, ge=1, description="weights travel in buckets of this size (verl: update_weights_bucket_megabytes)"
    )
    adapter_only: bool = Field(
        False,
        description="with actor.lora.r: the adapter alone is sent, some megabytes, and vLLM applies it beside the "
        "model's own weights, which costs 1.3 to 1.4 of the time of a token; false: it is sent merged into them",
    )

    @property
    def transfer_class(self) -> Any:
        """The class of the transfer; for ``auto``, before the placement decides it, the one that works everywhere."""
        return self.selected_class


class Cluster(Settings):
    """Ray."""

    address: str | None = Field(
        None, description="a running Ray cluster; null: RAY_ADDRESS, or the one launch/ray_cluster.sh started here, or "
        "a private one; local: a private one"
    )  # fmt: skip
    simulate_gpus: int | Literal["auto"] | None = Field(
        None, description="logical GPUs Ray hands out on a machine that has none; auto: as many as the layout needs, "
        f"at most {MAX_AUTO_SIMULATED_GPUS}, where no GPU is found"
    )  # fmt: skip
    share_gpus: bool = Field(
        False, description="where there are fewer GPUs than groups, and no pool sets which or how many it has, groups "
        "are colocated as in placement=single_gpu, 2gpu, 3gpu or 4gpu; placement=auto sets it"
    )  # fmt: skip
    cpu_threads: int | None = Field(
        None,
        ge=1,
        description="threads a worker computes with where there is no GPU; null: one for each million "
        "parameters or so of its model, at most all cores",
    )
    cpus_per_worker: float = Field(
        1.0, gt=0, description="CPUs reserved with each worker's GPU (verl: ray_init.num_cpus, of all)"
    )
    reserve_timeout_s: WaitSeconds = Field(300.0, description="time to wait for GPUs and CPUs to become free")
    offload: Literal["auto"] | bool = Field(
        "auto", description="the actor and engines on its GPUs leave these to each other: vLLM sleeps while the actor "
        "works (TRL: vllm_enable_sleep_mode; verl: free_cache_engine), the actor's weights and optimizer state are "
        "offloaded to the host while engines do (verl: param_offload, optimizer_offload; slime: --offload); auto: "
        "where they do not fit side by side"
    )  # fmt: skip
    start_timeout_s: WaitSeconds = Field(900.0, description="time workers have to start and to load their models")
    worker_restarts: int = Field(
        3, ge=0, description="times each engine, and each replica of a scorer, that dies or hangs is started again on "
        "its GPU while the run goes on; 0: others do its work, and the last one ends the run, see trainer.restarts"
    )  # fmt: skip

"""Which way weights take, for every kind of placement."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from gkd.actor.worker import ActorWorker
from gkd.config import Rollout, Weights
from gkd.config.compose import compose
from gkd.config.transfer import choose_transfer, require_gpus
from gkd.errors import ConfigError
from tests.weights.reports import reports

G = [f"GPU-{i}" for i in range(6)]
SIM = [f"SIM-ab-{i}" for i in range(4)]


@pytest.mark.parametrize(
    ("actor", "rollout", "engine", "way"),
    [
        ([G[0]], [G[1], G[2]], "vllm", "nccl"),
        ([G[0], G[1]], [G[2]], "vllm", "nccl"),
        ([G[0]], [G[0]], "vllm", "ipc"),
        ([G[0], G[1]], [G[0], G[1]], "vllm", "ipc"),
        ([G[0], G[1]], [G[1]], "vllm", "ipc"),
        ([G[0], G[1]], [G[1], G[2]], "vllm", "nccl"),  # one shared, but not with rank 0
        ([G[0], G[1]], [G[0], G[2]], "vllm", "object_store"),
        ([SIM[0]], [SIM[1]], "vllm", "object_store"),
        ([G[0]], [SIM[1]], "vllm", "object_store"),
        ([G[0]], [G[1]], "hf", "object_store"),
        ([G[0]], [G[0]], "hf", "object_store"),
        (["MIG-1"], ["MIG-2"], "vllm", "object_store"),
        (["MIG-1"], ["MIG-1"], "vllm", "object_store"),
    ],
)
def test_auto_picks_by_the_placement(actor: list[str], rollout: list[str], engine: str, way: str) -> None:
    chosen = choose_transfer(Weights(), Rollout(engine=engine), reports("actor", *actor), reports("rollout", *rollout))
    assert chosen == way
    assert (
        choose_transfer(
            Weights(transfer=way), Rollout(engine=engine), reports("actor", *actor), reports("rollout", *rollout)
        )
        == way
    )


@pytest.mark.parametrize(
    ("transfer", "actor", "rollout", "message"),
    [
        ("ipc", [SIM[0]], [SIM[0]], r"ipc: actor rank 0 \(.*\) .*\bCPU; weights.transfer=object_store "),
        ("nccl", [G[0]], [SIM[1]], r"nccl: rollout rank 0 \(.*\) .*\bCPU; weights.transfer=object_store "),
        (
            "ipc",
            [G[0]],
            [G[0], G[1]],
            r"ipc: rollout rank 1 .* GPU-1; .*=object_store ",
        ),
        (
            "ipc",
            [G[0]],
            [G[1]],
            r"GPU-1; weights.transfer=nccl or weights.transfer=object_store ",
        ),
        ("nccl", [G[0]], [G[0]], r"rollout rank 0 .* actor rank 0 .* both on GPU-0, .*; weights.transfer=ipc or"),
        ("nccl", ["MIG-1"], ["MIG-2"], r"nccl: actor rank 0 .*\(MIG\)"),
    ],
)
def test_a_way_that_cannot_work_is_one_line(transfer: str, actor: list[str], rollout: list[str], message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        choose_transfer(Weights(transfer=transfer), Rollout(), reports("actor", *actor), reports("rollout", *rollout))
    assert str(caught.value).startswith(f"weights.transfer={transfer}: ")
    assert "\n" not in str(caught.value)


def test_ways_of_shards_are_chosen_by_name_alone_and_say_what_they_lack(monkeypatch: pytest.MonkeyPatch) -> None:
    apart = reports("actor", G[0], G[1]), reports("rollout", G[2])
    lacking = {
        "nccl_m2n": r"finds no nccl.m2n here; .*nccl-extensions .*NCCL 2.30.5 .*VLLM_NCCL_SO_PATH",
        "sharded_rdt": r"finds no nixl._api here; pip install nixl",
    }
    for way, reason in lacking.items():
        monkeypatch.setattr("gkd.weights.shards.is_installed", lambda module: False)
        with pytest.raises(
            ConfigError, match=rf"weights.transfer={way}: .*{reason}.*; weights.transfer=nccl or .*would"
        ):
            choose_transfer(Weights(transfer=way), Rollout(), *apart)
        monkeypatch.setattr("gkd.weights.shards.is_installed", lambda module: True)
        assert choose_transfer(Weights(transfer=way), Rollout(), *apart) == way
        assert choose_transfer(Weights(), Rollout(), *apart) == "nccl"
        assert (
            choose_transfer(Weights(), Rollout(), reports("actor", G[0], G[1]), reports("rollout", G[0], G[2])) != way
        )
        for actor, rollout, why in (
            ([SIM[0]], [SIM[1]], "computes on a CPU"),
            (["MIG-1"], ["MIG-2"], r"slice of a GPU \(MIG\)"),
            ([G[0], G[1]], [G[1]], r"rollout rank 0 .* and actor rank 1 .* both on GPU-1, and it takes one rank a GPU"),
            ([G[0]], [G[1], G[1]], r"rollout rank 1 .* and rollout rank 0 .* both on GPU-1"),
        ):
            with pytest.raises(ConfigError, match=f"weights.transfer={way}: .*{why}"):
                choose_transfer(
                    Weights(transfer=way), Rollout(), reports("actor", *actor), reports("rollout", *rollout)
                )
    many = reports("actor", *(f"GPU-a{i}" for i in range(17)))
    with pytest.raises(ConfigError, match=r"nccl_m2n: .*\b17 ranks, .*\b16 parts\b.*; .*sharded_rdt or "):
        choose_transfer(Weights(transfer="nccl_m2n"), Rollout(), many, reports("rollout", G[0]))


@pytest.mark.parametrize("transfer", ["nccl_m2n", "sharded_rdt"])
def test_ways_of_shards_are_refused_what_they_cannot_do(transfer: str) -> None:
    assert compose([f"weights.transfer={transfer}"]).weights.transfer == transfer
    for overrides, why in (
        (["weights.checksum=true"], rf"weights.checksum=true: weights.transfer={transfer} has no buckets"),
        (["actor.lora.r=8"], rf"weights.transfer={transfer}: .*actor.lora.r=8 is merged"),
        (["actor.lora.r=8", "weights.adapter_only=true"], rf"weights.transfer={transfer}"),
    ):
        with pytest.raises(ConfigError, match=why) as caught:
            compose([f"weights.transfer={transfer}", *overrides])
        assert "\n" not in str(caught.value)


def test_engines_that_fetch_have_one_gpu_each() -> None:
    several = ["rollout.n_gpus_per_node=2", "rollout.tensor_parallel_size=2"]
    with pytest.raises(ConfigError, match=r"weights.transfer=sharded_rdt: .* rollout.tensor_parallel_size=2; nccl or"):
        compose(["weights.transfer=sharded_rdt", *several])
    assert compose(["weights.transfer=nccl_m2n", *several]).rollout.tensor_parallel_size == 2


@pytest.mark.parametrize("transfer", ["ipc", "nccl", "nccl_m2n", "sharded_rdt"])
def test_the_hf_engine_is_refused_before_anything_starts(transfer: str) -> None:
    with pytest.raises(ConfigError, match=rf"weights.transfer={transfer}: rollout.engine=hf .*object_store"):
        compose([f"weights.transfer={transfer}", "rollout.engine=hf"])
    with pytest.raises(ConfigError, match=r"rollout\.engine=hf .*object_store"):
        choose_transfer(
            Weights(transfer=transfer), Rollout(engine="hf"), reports("actor", G[0]), reports("rollout", G[0])
        )
    assert compose(["rollout.engine=hf"]).weights.transfer == "auto"


@pytest.mark.parametrize(
    ("overrides", "why"),
    [
        ([], r"there is no adapter; actor.lora.r, a rank, would do"),
        (["actor.lora.r=8", "actor.lora.quantize=nf4"], r"not in 4 bits as actor.lora.quantize=nf4 has"),
        (["actor.lora.r=8", "rollout.engine=hf"], r"rollout.engine=hf takes whole weights alone; rollout.engine=vllm"),
        (["actor.lora.r=513"], r"takes ranks up to 512, not actor.lora.r=513"),
        (["actor.lora.r=8", "weights.transfer=nccl"], r"not by weights.transfer=nccl; object_store or auto would do"),
        (
            ["actor.lora.r=8", "rollout.across_nodes=true", "rollout.nnodes=2", "rollout.n_gpus_per_node=2",
             "rollout.tensor_parallel_size=4"],
            r"engines over several nodes do not share its file",
        ),
    ],
)  # fmt: skip
def test_an_adapter_that_cannot_go_alone_is_refused_by_name(overrides: list[str], why: str) -> None:
    with pytest.raises(ConfigError, match=rf"weights.adapter_only=true: .*{why}"):
        compose(["+recipe=on_policy_distill", "weights.adapter_only=true", *overrides])


def test_copies_of_the_student_have_equal_shares_of_its_gpus() -> None:
    with pytest.raises(ConfigError, match=r"actor.fsdp_size=3: .* 4 GPUs"):
        compose(["trainer.n_gpus_per_node=4", "actor.fsdp_size=3"])
    with pytest.raises(ConfigError, match=r"actor.fsdp_size=2: weights.transfer=nccl_m2n "):
        compose(["trainer.n_gpus_per_node=4", "actor.fsdp_size=2", "weights.transfer=nccl_m2n"])
    assert compose(["trainer.n_gpus_per_node=4", "actor.fsdp_size=2"]).actor.fsdp_size == 2
    assert compose(["trainer.n_gpus_per_node=4", "actor.fsdp_size=4", "weights.transfer=nccl_m2n"]).actor.fsdp_size == 4


def test_an_adapter_alone_goes_through_the_host() -> None:
    who = reports("actor", G[0]), reports("rollout", G[1])
    assert choose_transfer(Weights(adapter_only=True), Rollout(engine="vllm"), *who) == "object_store"
    assert choose_transfer(Weights(), Rollout(engine="vllm"), *who) == "nccl"


places = st.sampled_from([*G, SIM[0]])


@given(
    st.lists(places, min_size=1, max_size=4, unique=True),
    st.lists(places, min_size=1, max_size=4, unique=True),
    st.sampled_from(["vllm", "hf"]),
)
def test_every_placement_has_a_way_and_no_other_is_accepted(actor: list[str], rollout: list[str], engine: str) -> None:
    """Against the rules in words."""
    on_gpus = engine == "vllm" and SIM[0] not in (*actor, *rollout)
    can = {"ipc": on_gpus and set(rollout) <= set(actor), "nccl": on_gpus and actor[0] not in rollout}
    can["object_store"] = True
    who = reports("actor", *actor), reports("rollout", *rollout)
    assert choose_transfer(Weights(), Rollout(engine=engine), *who) == next(way for way in can if can[way])
    for way, possible in can.items():
        if possible:
            assert choose_transfer(Weights(transfer=way), Rollout(engine=engine), *who) == way
        else:
            with pytest.raises(ConfigError, match=f"weights.transfer={way}: "):
                choose_transfer(Weights(transfer=way), Rollout(engine=engine), *who)


@pytest.mark.parametrize("name", ["PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"])
def test_memory_that_cannot_be_shared_is_refused_by_name(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    threads = f"cluster.cpu_threads={torch.get_num_threads()}"  # building one sets them
    config = compose(["weights.transfer=ipc", threads])
    for value in ("expandable_segments:False", "max_split_size_mb:128"):
        monkeypatch.setenv(name, value)
        ActorWorker(config, "", 0, 1, "cpu")
    monkeypatch.setenv(name, "max_split_size_mb:128,expandable_segments:True")
    with pytest.raises(ConfigError, match=f"{name}=max_split_size_mb:128,expandable_segments:True.*=object_store"):
        ActorWorker(config, "", 0, 1, "cpu")
    ActorWorker(compose(["weights.transfer=nccl", threads]), "", 0, 1, "cpu")


def test_a_transfer_between_gpus_is_refused_where_there_are_none() -> None:
    with pytest.raises(ConfigError, match=r"weights\.transfer=nccl: "):
        require_gpus(Weights(transfer="nccl"), "cpu")
    require_gpus(Weights(transfer="nccl"), "cuda")
    for way in ("auto", "object_store"):
        require_gpus(Weights(transfer=way), "cpu")

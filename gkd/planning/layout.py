"""What is planned: a configuration with its models' shapes, the hardware, and the batch of a step.

Memory, speed and links of GPU types are those of the makers' data sheets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from gkd.cluster import host
from gkd.cluster.gpu import read_first_usable
from gkd.cluster.layout.nodes import group_requests, make_idle_nodes, solve
from gkd.cluster.workers.environment import threads_for
from gkd.config import Config, Engine, Plan, RewardModel, Rollout, Scorer, suggest
from gkd.config.device import GB, GIB, Device
from gkd.config.top_k import required_top_k
from gkd.data.task import require_teacher, task_of
from gkd.errors import ConfigError
from gkd.planning.shapes import ModelShape, shape_of
from gkd.planning.sizes import shape_of_size
from gkd.planning.stored import read_shape

F32 = 4
DEFAULT_GPU = "h100-80gb"
GPU_EFFICIENCY, CPU_EFFICIENCY = 0.24, 0.3
GPU_SETTINGS = ("gpus", "gpus_by_node", "colocate_with")  # settings of a pool that choose its GPUs


@dataclass(frozen=True, slots=True)
class Hardware:
    """Describes a GPU, or a machine's CPU that all workers share.

    ``memory`` bytes that CUDA reports; ``flops`` a second that matrix products reach; ``bandwidth`` of the memory,
    ``link`` within and ``network`` between nodes, bytes a second.
    """

    name: str
    memory: float
    flops: float
    bandwidth: float
    link: float
    network: float
    is_cpu: bool = False


# Memory as CUDA reports it (GiB), dense bfloat16 TFLOP/s, memory GB/s, GPU-to-GPU GB/s one way (NVLink, or PCIe).
GPU_TYPES: dict[str, tuple[float, float, float, float]] = {
    "b200": (178.0, 2250, 8000, 900),
    "h200": (139.8, 989, 4800, 450),
    "h100-80gb": (79.1, 989, 3350, 450),
    "h100-pcie": (79.1, 756, 2000, 64),
    "a100-80gb": (79.1, 312, 2039, 300),
    "a100-40gb": (39.4, 312, 1555, 300),
    "l40s": (44.4, 362, 864, 32),
    "l4": (22.0, 121, 300, 16),
    "a10": (22.0, 125, 600, 32),
    "rtx-5090": (31.4, 209, 1792, 64),
    "rtx-4090": (23.5, 165, 1008, 32),
    "rtx-3090": (23.6, 71, 936, 16),
    "rtx-3060": (11.6, 25, 360, 16),
}


def gpu_hardware(plan: Plan) -> Hardware:
    """Return the GPU that the settings name, else this machine's, else the default.

    Where ``plan.memory_gb`` alone describes it, or this machine's is of no known type, it is taken to be as fast as the
    known type nearest to its memory. Raises ConfigError for a type that is named and not known.
    """
    named, memory = plan.gpu_type, plan.memory_gb
    if named is None and memory is None:
        named, memory = _gpu_here() or (DEFAULT_GPU, None)
    name = shown = named or "a GPU"
    if plan.gpu_type is None and name not in GPU_TYPES and memory is not None:
        n_bytes = memory * GB
        name = min(GPU_TYPES, key=lambda gpu: abs(GPU_TYPES[gpu][0] * GIB - n_bytes))
        shown = f"{shown}, taken to be as fast as {name} (plan.gpu_type),"
    if name not in GPU_TYPES:
        names = ", ".join(GPU_TYPES)
        raise ConfigError(
            f"plan.gpu_type={name} is not known{suggest(name, list(GPU_TYPES))}; there are {names}, or give "
            "plan.memory_gb, plan.tflops, plan.memory_bandwidth_gb_s and plan.link_gb_s beside one of them"
        )
    gib, tflops, bandwidth, link = GPU_TYPES[name]
    return Hardware(
        name=shown,
        memory=memory * GB if memory else gib * GIB,
        flops=(plan.tflops or tflops) * 1e12 * (plan.efficiency or GPU_EFFICIENCY),
        bandwidth=(plan.memory_bandwidth_gb_s or bandwidth) * 1e9,
        link=(plan.link_gb_s or link) * 1e9,
        network=plan.network_gb_s * 1e9,
    )


def cpu_hardware(plan: Plan) -> Hardware:
    """Return this machine without a GPU: 0.1 TFLOP/s a core in float32, as measured on an AMD EPYC."""
    cores = host.cores()
    memory = plan.memory_gb * GB if plan.memory_gb else host.memory()
    flops = (plan.tflops or 0.1 * cores) * 1e12 * (plan.efficiency or CPU_EFFICIENCY)
    bandwidth, link = (plan.memory_bandwidth_gb_s or 20) * 1e9, (plan.link_gb_s or 5) * 1e9
    return Hardware(f"CPU, {cores} cores", memory, flops, bandwidth, link, plan.network_gb_s * 1e9, is_cpu=True)


def _gpu_here() -> tuple[str, float] | None:
    """Return the known type of this machine's first usable GPU, else the driver's name of it, and its memory in GB.

    None where there is none.
    """
    gpu = read_first_usable()
    if gpu is None:
        return None
    name, n_bytes = gpu
    return find_gpu_type(name, n_bytes / GIB) or name, n_bytes / GB


def find_gpu_type(name: str, gib: float) -> str | None:
    """Return the known type of a driver's name such as ``NVIDIA A100-SXM4-40GB``.

    Of several that fit the one with the nearest memory, and of these the one with most words of the name. None for a
    slice, ``NVIDIA A100-SXM4-80GB MIG 1g.10gb``, which is as fast as no whole GPU.
    """
    words = set(name.lower().replace("-", " ").split())
    if "mig" in words:
        return None
    parts = {gpu: {part for part in gpu.split("-") if "gb" not in part} for gpu in GPU_TYPES}
    fitting = [gpu for gpu in GPU_TYPES if parts[gpu] <= words]
    return min(fitting, key=lambda gpu: (abs(GPU_TYPES[gpu][0] - gib), -len(parts[gpu])), default=None)


@dataclass(frozen=True, slots=True)
class Models:
    """Holds the shapes of the student, the teacher (of several the largest), the reward model, and a reference that is
    not the student; None where a run has none, or where it is outside the cluster.
    """

    student: ModelShape
    teacher: ModelShape | None
    reward_model: ModelShape | None = None
    reference: ModelShape | None = None

    def shape_of(self, group: str) -> ModelShape:
        """Return the shape that a group loads."""
        if group == "reference":
            return self.reference or self.student
        if group not in ("teacher", "reward_model"):
            return self.student
        shape = self.teacher if group == "teacher" else self.reward_model
        assert shape is not None, f"a group {group} has a model"
        return shape

    @property
    def assumption(self) -> str:
        """What was assumed of a model whose weights are not counted as they are; empty without one."""
        shapes = (self.student, self.teacher, self.reward_model, self.reference)
        return next((shape.note for shape in shapes if shape is not None and not shape.is_exact), "")

    def positions(self) -> dict[str, int]:
        """Return the positions of the models that read prompts with responses, of those that have a limit."""
        models = {"student": self.student, "teacher": self.teacher, "reference": self.reference}
        return {name: model.positions for name, model in models.items() if model is not None and model.positions}


@dataclass(frozen=True, slots=True)
class Workload:
    """Describes a step's batch: ``samples`` of ``prompt`` + ``response`` tokens each on average, at most ``longest``.

    They have ``prompts`` different prompts; the teacher gives ``top_k`` log-probabilities a position.
    """

    samples: int
    prompts: int
    prompt: int
    response: int
    longest: int
    top_k: int

    @property
    def length(self) -> int:
        """Count the tokens of a sample of mean length."""
        return self.prompt + self.response


@dataclass(frozen=True)  # without slots: what is worked out once is kept
class Layout:
    """Holds a configuration with everything that its plan follows from.

    ``nodes``: how many GPUs each node has, which limits advice; None for as many nodes as it takes.
    """

    config: Config
    models: Models
    hardware: Hardware
    nodes: tuple[int, ...] | None = None

    @cached_property
    def device(self) -> Device:
        """Return what models compute on."""
        return "cpu" if self.hardware.is_cpu else "cuda"

    @cached_property
    def compute_bytes(self) -> int:
        """Return the bytes of a number of the type that models compute in."""
        return 4 if self.config.model.dtype_on(self.device) == "float32" else 2

    @cached_property
    def gpus_per_node(self) -> int:
        """Return the most GPUs of a node that advice may use."""
        return self.config.plan.gpus_per_node if self.nodes is None else max(self.nodes)

    @cached_property
    def hosts(self) -> dict[str, str]:
        """Map every group on the devices of another to that one; on a CPU all share the machine's cores."""
        if not self.hardware.is_cpu:
            return self.config.hosts()
        return dict.fromkeys(self.config.groups(), "actor")

    @cached_property
    def may_share(self) -> set[frozenset[str]]:
        """Return pairs of groups that may be on the same GPU."""
        return self.config.may_share()

    @cached_property
    def groups_at_once(self) -> int:
        """Return how many groups compute at full speed on the devices that they share: on a CPU, as cores allow."""
        if not self.hardware.is_cpu:
            return 1
        shapes = [self.models.student] + ([self.models.teacher] if self.models.teacher is not None else [])
        largest = max(F32 * shape.n_parameters for shape in shapes)
        return max(1, host.cores() // threads_for(largest, self.config.cluster.cpu_threads))

    @cached_property
    def workload(self) -> Workload:
        """Return the batch of a step."""
        config = self.config
        longest = config.data.max_prompt_length + config.rollout.max_response_length
        longest = min([longest, *self.models.positions().values()])
        response, prompt = config.rollout.max_response_length, max(1, longest - config.rollout.max_response_length)
        if config.plan.response_length is not None:  # that of an earlier run may be above these limits
            response = min(response, config.plan.response_length)
        if config.plan.prompt_length is not None:
            prompt = min(prompt, config.plan.prompt_length)
        top_k = required_top_k(config, self.models.student.vocabulary) if config.algorithm.distils else 0
        prompts = config.trainer.batch_size
        return Workload(prompts * config.rollout.n, prompts, prompt, response, longest, top_k)


def engine_class(engine: Engine | RewardModel, shape: ModelShape) -> Any:
    """Return the class of the engines of a pool that run such a model; it states what they can do and take.

    See :class:`gkd.inference.engine.InferenceEngine`.
    """
    if isinstance(engine, Scorer):
        return engine.registry.load(engine.engine_for(lambda: shape.is_dense))
    assert isinstance(engine, Rollout | RewardModel), "a pool of engines samples, scores or rates"
    return engine.engine_class


def nodes_of(config: Config) -> tuple[int, ...] | None:
    """Return the GPUs of every node in ``plan.nodes``; None where it is null, or its nodes have no room."""
    nodes = tuple(config.plan.nodes or ())
    return nodes if nodes and has_room(config, nodes) else None


def has_room(config: Config, nodes: Sequence[int]) -> bool:
    """Return whether idle nodes with so many GPUs each have room for all groups."""
    requests = group_requests(config)
    most = sum(request.nnodes for request in requests)  # of nodes of one size more are of no use
    enough = [size for size, count in Counter(nodes).items() for _ in range(min(count, most))]
    return solve(requests, make_idle_nodes(enough), 0.0) is not None


def models_of(config: Config) -> Models:
    """Return shapes by path, by size, or of a task's own models. Raises ConfigError where a model cannot be found."""
    reward_model = config.reward_model.model.path if config.has_reward_model_group else None
    scores = None if reward_model is None else read_shape(reward_model, "reward_model.model.path")
    if config.uses_task:
        made = task_of(config).model_configs()
        require_teacher(config, "teacher" in made)
        teacher = shape_of(made["teacher"]) if config.algorithm.needs_teacher else None
        return Models(shape_of(made["student"]), teacher, scores)
    reference = config.reference.model.path
    return Models(
        _shape(config.model.path, config.model.size, "model"),
        _teacher_shape(config),
        scores,
        None if reference is None else read_shape(reference, "reference.model.path"),
    )


def require_lengths(config: Config, models: Models) -> None:
    """Raise ConfigError for mean lengths above their limits, and for texts longer than the positions of a model."""
    plan, longest, response = config.plan, config.data.max_prompt_length, config.rollout.max_response_length
    if plan.prompt_length is not None and plan.prompt_length > longest:
        raise ConfigError(f"plan.prompt_length={plan.prompt_length} is above data.max_prompt_length={longest}")
    if plan.response_length is not None and plan.response_length > response:
        raise ConfigError(
            f"plan.response_length={plan.response_length} is above rollout.max_response_length={response}"
        )
    for name, positions in models.positions().items():
        if response + (plan.prompt_length or 1) > positions:
            prompt = "a prompt" if plan.prompt_length is None else f"plan.prompt_length={plan.prompt_length}"
            raise ConfigError(
                f"rollout.max_response_length={response} leaves no room for {prompt}: the {name} has {positions} "
                "positions"
            )


def _find_largest(teachers: Mapping[str, ModelShape]) -> ModelShape:
    """Return the shape of the largest teacher, with the positions of the shortest, which end texts for all."""
    name, shape = max(teachers.items(), key=lambda item: item[1].n_parameters)
    note = (
        f"each of the teacher's engines is taken to have the largest model, {name}, and as many samples as the others"
    )
    positions = min((teacher.positions for teacher in teachers.values() if teacher.positions), default=None)
    return replace(shape, positions=positions, note="; ".join(filter(None, (shape.note, note))), is_exact=False)


def _teacher_shape(config: Config) -> ModelShape | None:
    """Return the shape of the teacher, of several the largest; None without one, or outside the cluster."""
    model, models = config.teacher.model, config.teacher.models
    if models:
        return _find_largest({name: read_shape(path, f"teacher.models.{name}") for name, path in models.items()})
    is_named = model.path is not None or model.size is not None
    return _shape(model.path, model.size, "teacher.model") if config.algorithm.needs_teacher and is_named else None


def _shape(path: str | None, size: str | None, setting: str) -> ModelShape:
    if path is not None:
        return read_shape(path, f"{setting}.path")
    assert size is not None, "a model is given by path or by size"
    return shape_of_size(size)


def without_colocation(layout: Layout) -> Layout:
    """Return the layout with every group on GPUs of its own, and without ranges of GPUs."""
    config = layout.config
    settings = {f"{section}.{name}": None for section, _ in config.pools() for name in GPU_SETTINGS}
    return replace(layout, config=config.with_settings(settings | placement_defaults(config)))


def placement_defaults(config: Config) -> dict[str, Any]:
    """Return the defaults of settings about the nodes there are, or about shared GPUs, that have other values."""
    offload = {"cluster.offload": "auto"} if config.cluster.offload is True else {}
    return offload if config.plan.nodes is None else offload | {"plan.nodes": None}

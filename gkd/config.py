"""Every setting of a run: its name, type, default and meaning.

Hydra composes the tree (:mod:`gkd.compose`); this module turns the result into typed, frozen objects once, and
everything below takes those. Nothing here imports torch, vLLM, Ray or Hydra, so checking a configuration is instant.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from gkd.errors import ConfigError

MAX_AUTO_SIMULATED_GPUS = 8


def parse_gpus(value: Any) -> list[int] | None:
    """GPU indices on each node from a range ``0-1``, a list ``'4,5,6,7'`` or ``[4, 5]``, or a number ``7``.

    Returns them sorted, or None for None. Raises ValueError on anything else, on a repeated or a negative index.
    """
    if value is None:
        return None
    parts = value if isinstance(value, list) else str(value).split(",")
    if not parts:
        raise ValueError("the list of GPUs is empty")
    found: list[int] = []
    for part in parts:
        match = re.fullmatch(r"\s*(\d+)\s*(?:-\s*(\d+)\s*)?", str(part))
        if match is None:
            raise ValueError("expected a range such as 0-3, a list such as '4,5,6,7', or one number")
        first, last = int(match[1]), int(match[2] or match[1])
        if last < first:
            raise ValueError(f"the range {first}-{last} runs backwards")
        if last - first >= 1024:
            raise ValueError(f"the range {first}-{last} names more GPUs than any node has")
        found += range(first, last + 1)
    if len(set(found)) != len(found):
        raise ValueError("an index is named twice")
    return sorted(found)


def _as_list(value: Any) -> Any:
    return [value] if isinstance(value, str) else value


Files = Annotated[list[str], BeforeValidator(_as_list)]
Beta = Annotated[float, Field(ge=0, lt=1)]
GpuRange = Annotated[list[int] | None, BeforeValidator(parse_gpus)]


class Settings(BaseModel):
    """Base of every section: unknown keys are refused, values keep their YAML types, nothing changes afterwards."""

    model_config: ClassVar[ConfigDict] = ConfigDict(extra="forbid", frozen=True, strict=True, validate_default=True)


class Pool(Settings):
    """GPUs of one group of workers: ``n_gpus_per_node`` on each of ``nnodes`` nodes, one worker a GPU."""

    n_gpus_per_node: int = Field(
        1,
        ge=1,
        description="GPUs of this group on each node, one worker a GPU; null: as many as gpus names, or 1",
    )
    nnodes: int = Field(1, ge=1, description="nodes this group spans")
    gpus: GpuRange = Field(
        None, description="exact GPU indices on each node: 0-1, '4,5,6,7' or 7; null: the next free ones"
    )

    @model_validator(mode="before")
    @classmethod
    def _count_from_range(cls, values: Any) -> Any:
        # A range says how many GPUs there are, so the count need not be written twice.
        if not isinstance(values, dict) or values.get("n_gpus_per_node") is not None:
            return values
        try:
            found = parse_gpus(values.get("gpus"))
        except ValueError:  # the field's own check names the key
            found = None
        return {**values, "n_gpus_per_node": len(found or [0])}

    @model_validator(mode="after")
    def _range_and_count_agree(self) -> Pool:
        if self.gpus is not None and len(self.gpus) != self.n_gpus_per_node:
            raise ValueError(f"gpus names {len(self.gpus)} GPUs but n_gpus_per_node is {self.n_gpus_per_node}")
        return self

    @property
    def n_workers(self) -> int:
        """Workers of the group over all its nodes."""
        return self.n_gpus_per_node * self.nnodes


class Model(Settings):
    """The student."""

    path: str | None = Field(
        None, description="directory of a Hugging Face causal language model, or a name in the local cache; "
        "null: the built-in task's student"
    )  # fmt: skip
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto", description="type the models compute in; auto: bfloat16 on a GPU, float32 on a CPU"
    )

    def dtype_on(self, device: Literal["cpu", "cuda"]) -> Literal["float32", "bfloat16"]:
        """What ``dtype`` means on a device. On a CPU bfloat16 is six times slower than float32."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if device == "cpu" else "bfloat16"


class TeacherModel(Settings):
    """Which model the teacher serves."""

    path: str | None = Field(
        None, description="directory or locally cached name of the teacher; null: the built-in task's"
    )


class Engine(Pool):
    """A pool of vLLM engines, one for every ``tensor_parallel_size`` GPUs."""

    tensor_parallel_size: int = Field(1, ge=1, description="GPUs one engine spans; divides n_gpus_per_node")
    gpu_memory_utilization: float = Field(0.85, gt=0, le=1, description="share of a GPU's memory the engine may use")
    kv_cache_gb: int = Field(1, ge=1, description="size of the key-value cache of an engine on a CPU, GiB")
    max_num_seqs: int = Field(128, ge=1, description="sequences one engine works on at the same time")
    enforce_eager: bool = Field(False, description="no CUDA graphs and no compilation on a GPU; a CPU never has them")

    @model_validator(mode="after")
    def _engines_fill_the_pool(self) -> Engine:
        if self.n_gpus_per_node % self.tensor_parallel_size:
            raise ValueError(
                f"tensor_parallel_size={self.tensor_parallel_size} does not divide "
                f"n_gpus_per_node={self.n_gpus_per_node}"
            )
        return self


class Teacher(Engine):
    """vLLM engines behind a ZeroMQ server, in a pool of their own or outside the cluster."""

    model: TeacherModel = TeacherModel()
    server_ip: str | None = Field(
        None, description="host or comma-separated hosts of an external teacher, used instead of a pool; "
        "for gkd.teacher.serve the address to listen on"
    )  # fmt: skip
    server_port: int = Field(15555, ge=1, le=65535, description="port of an external teacher (see server_ip)")
    key_file: str | None = Field(
        None,
        description="CURVE key shared by server and clients; needed when server_ip is not loopback, and made "
        "for the run where it spans several machines",
    )
    max_top_k: int = Field(32768, ge=1, description="largest K a request may ask for; the full vocabulary counts too")
    max_model_len: int | None = Field(None, ge=2, description="longest sequence scored, tokens; null: the model's own")
    request_timeout_s: float = Field(120.0, gt=0, description="time one replica has for one request")
    max_num_seqs: int = Field(32, ge=1, description="sequences one engine scores at the same time")
    max_attempts: int = Field(3, ge=1, description="times a request is sent, to other replicas where there are any")
    heartbeat_s: float = Field(2.0, gt=0, description="interval of heartbeats; three missed put a replica out")


class Trainer(Pool):
    """The loop, and the actor's pool."""

    total_steps: int = Field(100, ge=1, description="optimizer steps")
    batch_size: int = Field(64, ge=1, description="prompts a step")
    seed: int = Field(0, ge=0, description="seed of data order, sampling and the built-in student")
    val_every: int = Field(50, ge=1, description="validate every so many steps, also before the first and at the end")
    output_dir: str | None = Field(None, description="where the run writes; null: outputs/RECIPE/DATE_TIME")
    update_timeout_s: float = Field(1800.0, gt=0, description="time one update of the actor may take")
    n_logged_samples: int = Field(4, ge=0, description="samples a step that are written to samples.jsonl")


class Rollout(Engine):
    """Sampling from the student."""

    engine: Literal["vllm", "hf"] = Field("vllm", description="hf: transformers' generate, for models unknown to vLLM")
    n: int = Field(1, ge=1, description="samples a prompt")
    max_response_length: int = Field(256, ge=1, description="tokens a response may have, its end token included")
    temperature: float = Field(1.0, gt=0, description="temperature the student is sampled at")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus the student is sampled from")
    timeout_s: float = Field(1800.0, gt=0, description="time a batch may take to be sampled and scored")

    @model_validator(mode="after")
    def _hf_runs_on_one_gpu(self) -> Rollout:
        if self.engine == "hf" and self.tensor_parallel_size > 1:
            raise ValueError(f"engine=hf runs on one GPU; tensor_parallel_size={self.tensor_parallel_size} is vllm's")
        return self


class Actor(Settings):
    """How the student is trained."""

    lr: float = Field(1e-6, gt=0, description="peak learning rate of AdamW")
    warmup_steps: int = Field(0, ge=0, description="steps over which the learning rate rises linearly to its peak")
    lr_decay: Literal["constant", "linear", "cosine"] = Field(
        "constant", description="shape of the learning rate after warm-up; linear and cosine end at a tenth of the peak"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    betas: list[Beta] = Field([0.9, 0.999], min_length=2, max_length=2, description="AdamW's betas")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    max_tokens_per_micro_batch: int = Field(8192, ge=1, description="tokens packed into one micro-batch on one rank")
    gradient_checkpointing: bool = Field(False, description="recompute activations in the backward pass")
    loss_chunk: int = Field(1024, ge=1, description="positions whose logits exist at the same time")


class Data(Settings):
    """Prompts."""

    train_files: Files = Field([], description="JSONL, Parquet or datasets directories; empty: the built-in task")
    val_files: Files = Field([], description="held-out prompts, same formats")
    prompt_key: str = Field("prompt", description="column of the prompt; messages go through the chat template")
    answer_key: str | None = Field(None, description="column of the reference answer; null: no accuracy is measured")
    max_prompt_length: int = Field(1024, ge=1, description="longer prompts are counted and left out, tokens")
    val_limit: int = Field(256, ge=1, description="validation prompts used at most")


class Builtin(Settings):
    """The built-in task: sort digits. Used when no model and no data are named."""

    digits: int = Field(8, ge=2, le=32, description="digits to sort")
    teacher_steps: int = Field(400, ge=1, description="supervised steps the teacher is trained for, once, then cached")
    student_steps: int = Field(
        80,
        ge=1,
        description="supervised steps that warm the student up, fewer once a quarter of fresh prompts is right",
    )
    cache_dir: str | None = Field(None, description="where trained models are kept; null: ~/.cache/gkd")


class Loss(Settings):
    """Divergence between student and teacher at every response position."""

    name: Literal["forward_kl", "reverse_kl", "jsd", "sampled_reverse_kl"] = Field(
        "reverse_kl", description="which divergence; sampled_reverse_kl is a policy gradient on the sampled tokens"
    )
    beta: float = Field(0.5, ge=0, le=1, description="jsd's weight of the teacher: 0 is forward KL, 1 is reverse KL")
    top_k: int | None = Field(None, ge=1, description="teacher's K most likely tokens; null: the full vocabulary")
    tail: bool = Field(True, description="with top_k: the rest of both distributions in one bucket, or left out")
    temperature: float = Field(1.0, ge=1e-3, le=1e3, description="temperature of both distributions inside the loss")


class Algorithm(Settings):
    """What is optimised."""

    name: Literal["on_policy_distill"] = Field("on_policy_distill", description="the algorithm")
    loss: Loss = Loss()


class Weights(Settings):
    """From the actor to the rollout engines, after every step."""

    timeout_s: float = Field(300.0, gt=0, description="time one push may take")
    checksum: bool = Field(False, description="verify every push with a digest of its bytes")
    bucket_mb: int = Field(512, ge=1, description="weights travel in pieces of this size")


class Cluster(Settings):
    """Ray."""

    address: str | None = Field(None, description="a running Ray cluster; null: RAY_ADDRESS, or a private one here")
    simulate_gpus: int | Literal["auto"] | None = Field(
        None, description="logical GPUs Ray hands out on a machine that has none; auto: as many as the layout asks, "
        f"at most {MAX_AUTO_SIMULATED_GPUS}, where no GPU is found"
    )  # fmt: skip
    cpu_threads: int | None = Field(
        None, ge=1, description="threads a worker computes with where there is no GPU; null: all cores"
    )
    cpus_per_worker: float = Field(1.0, gt=0, description="CPUs reserved with each worker's GPU")
    reserve_timeout_s: float = Field(300.0, gt=0, description="time to wait for GPUs and CPUs to become free")
    start_timeout_s: float = Field(900.0, gt=0, description="time workers have to start and to load their models")


class Config(Settings):
    """One run."""

    recipe: str = Field("none", description="name of the recipe, part of the default output directory")
    model: Model = Model()
    teacher: Teacher = Teacher()
    trainer: Trainer = Trainer()
    rollout: Rollout = Rollout()
    actor: Actor = Actor()
    data: Data = Data()
    builtin: Builtin = Builtin()
    algorithm: Algorithm = Algorithm()
    weights: Weights = Weights()
    cluster: Cluster = Cluster()

    @model_validator(mode="after")
    def _own_models_and_data_go_together(self) -> Config:
        teacher_given = self.teacher.model.path is not None or self.teacher.server_ip is not None
        given = {
            "model.path": self.model.path is not None,
            "teacher.model.path (or teacher.server_ip)": teacher_given,
            "data.train_files": bool(self.data.train_files),
            "data.val_files": bool(self.data.val_files),
        }
        if any(given.values()) and not all(given.values()):
            have = ", ".join(k for k, v in given.items() if v)
            lack = ", ".join(k for k, v in given.items() if not v)
            raise ValueError(f"given {have} but not {lack}: name all of them, or none for the built-in task")
        return self

    @model_validator(mode="after")
    def _external_teacher_has_no_pool(self) -> Config:
        if self.teacher.server_ip is not None and self.teacher.gpus is not None:
            raise ValueError("teacher.gpus and teacher.server_ip exclude each other: an external teacher has no pool")
        return self

    @model_validator(mode="after")
    def _ranges_are_disjoint(self) -> Config:
        owner: dict[int, str] = {}
        for name, pool in self.pools():
            for index in pool.gpus or []:
                if index in owner:
                    raise ValueError(f"{owner[index]}.gpus and {name}.gpus overlap: both name GPU {index}")
                owner[index] = name
        return self

    @model_validator(mode="after")
    def _policy_gradient_is_on_policy(self) -> Config:
        loss, rollout = self.algorithm.loss, self.rollout
        if loss.name == "sampled_reverse_kl" and not rollout.temperature == loss.temperature == rollout.top_p == 1.0:
            raise ValueError(
                "algorithm.loss.name=sampled_reverse_kl is a policy gradient on the plain model's samples: "
                "rollout.temperature, rollout.top_p and algorithm.loss.temperature must be 1"
            )
        return self

    def pools(self) -> Iterator[tuple[str, Pool]]:
        """Sections that own GPUs, in the order GPUs are handed out: trainer (the actor), rollout, teacher."""
        yield "trainer", self.trainer
        yield "rollout", self.rollout
        if self.teacher.server_ip is None:
            yield "teacher", self.teacher

    @property
    def uses_builtin_task(self) -> bool:
        """Whether the run makes its own models and data."""
        return self.model.path is None


def settings() -> dict[str, str]:
    """Every setting's dotted name and its meaning."""

    def walk(section: type[Settings], prefix: str) -> Iterator[tuple[str, str]]:
        for name, field in section.model_fields.items():
            kind = field.annotation
            if isinstance(kind, type) and issubclass(kind, Settings):
                yield from walk(kind, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", field.description or ""

    return dict(walk(Config, ""))


def nearest(key: str, known: Mapping[str, Any] | list[str]) -> str:
    """`` (did you mean X?)`` for a misspelt name, or an empty string when nothing is near."""
    close = difflib.get_close_matches(key, list(known), n=1, cutoff=0.6)
    if not close:  # the right leaf under the wrong section: compare last parts
        leaf = key.rsplit(".", 1)[-1]
        close = [k for k in known if k.rsplit(".", 1)[-1] == leaf][:1]
    return f" (did you mean {close[0]}?)" if close else ""


def load(tree: Mapping[str, Any]) -> Config:
    """Turn a composed tree into a checked :class:`Config`.

    Raises ConfigError, in one line, for the first thing that is wrong.
    """
    try:
        return Config.model_validate(dict(tree))
    except ValidationError as error:
        first = error.errors()[0]
        # Union branches add their type's name to the location; only real keys are shown.
        key = ".".join(str(part) for part in first["loc"] if not re.search(r"[\[\]()]|^(int|str|literal)", str(part)))
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"unknown setting {key}{nearest(key, settings())}") from None
        message = str(first["msg"]).removeprefix("Value error, ")
        message = message[0].lower() + message[1:]
        shown = "" if isinstance(first["input"], Mapping) else f"={first['input']}"
        raise ConfigError(f"{key}{shown}: {message}" if key else message) from None

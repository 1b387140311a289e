"""Models, and the groups of workers: actor, rollout, teacher, reference, reward model."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, Field, model_validator

from gkd.config.base import OWN_CLASS, Engine, Pool, Settings, WaitSeconds
from gkd.config.device import Device, Dtype
from gkd.config.open import OpenSections, OpenSettings
from gkd.config.registry import EntryName, EntryNames, Registry
from gkd.config.sampling import StudentSampling
from gkd.config.validating import ValidationSettings

TRACKERS = Registry(
    "trainer.trackers",
    {
        "tensorboard": "gkd.observability.trackers.tensorboard:TensorBoard",
        "wandb": "gkd.observability.trackers.wandb:WandB",
        "mlflow": "gkd.observability.trackers.mlflow:MLflow",
    },
)

OVERBOOKED = 2
"""All clients together have so many times ``max_num_seqs`` requests out at one server that scores: enough that it never
waits for them, and few enough that the last one is reached in time. All others wait at the clients, where their time
does not run and what is trained first is sent first."""

_SIZE = re.compile(r"(\d*[1-9]\d*(\.\d+)?|\d+\.\d*[1-9]\d*)[mMbB]")


def _require_size(size: str | None) -> str | None:
    if size is not None and not _SIZE.fullmatch(size):
        raise ValueError("a number of parameters, in millions or billions, such as 350m or 7b")
    return size


Size = Annotated[str | None, AfterValidator(_require_size)]


class _PathOrSize(Settings):
    """A model that exists, or one of a usual shape."""

    path: str | None = None
    size: Size = None

    @model_validator(mode="after")
    def _one_of_both(self) -> _PathOrSize:
        if self.path is not None and self.size is not None:
            raise ValueError(
                f"path={self.path} and size={self.size} exclude each other: size is for planning without a model"
            )
        return self


class Model(_PathOrSize):
    """The student."""

    path: str | None = Field(
        None, description="directory of a Hugging Face causal language model, or a name in the local cache; "
        "null: the built-in task's student (TRL: model_name_or_path; slime: hf_checkpoint)"
    )  # fmt: skip
    size: Size = Field(
        None, description="instead of path, for gkd.plan alone: a usual model of so many parameters, such as 1.5b or 7b"
    )
    dtype: Literal["auto", "float32", "bfloat16"] = Field(
        "auto",
        description="type the models compute in; auto: bfloat16 on a GPU, float32 on a CPU (TRL: torch_dtype, bf16)",
    )

    def dtype_on(self, device: Device) -> Dtype:
        """Return what ``dtype`` means on a device. On a CPU bfloat16 is six times slower than float32."""
        if self.dtype != "auto":
            return self.dtype
        return "float32" if device == "cpu" else "bfloat16"


class TeacherModel(_PathOrSize):
    """The model that the teacher serves."""

    path: str | None = Field(
        None,
        description="directory or locally cached name of the teacher; null: the built-in task's (TRL: "
        "teacher_model_name_or_path; verl: teacher_model.model_path)",
    )
    size: Size = Field(None, description="instead of path, for gkd.plan alone: a usual model of so many parameters")


ENGINE = "gkd.inference.engine:InferenceEngine"
SCORING_ENGINES = {
    "torch": "gkd.inference.torch_scorer:TorchScorer",
    "vllm": "gkd.inference.vllm_scorer:VLLMScorer",
}


def scorer_group(scorer: str) -> str:
    """Return the group of a model that scores: ``teacher`` of ``teacher:NAME``, ``reference``, ..."""
    return scorer.partition(":")[0]


def model_setting(scorer: str) -> str:
    """Return the setting that names a model that scores: ``teacher``, ``teacher:NAME``, ``reference``, ..."""
    group, _, teacher = scorer.partition(":")
    return f"teacher.models.{teacher}" if teacher else f"{group}.model.path"


class EngineSection(OpenSettings):
    """Names the class of a pool's engines, which has settings of its own beside it."""

    selects: ClassVar[str] = "engine"
    ability: ClassVar[str]
    """The class attribute of :class:`gkd.inference.engine.InferenceEngine` that states whether a class will do."""

    engine: EntryName

    @property
    def engine_class(self) -> Any:
        """The class of the engines, which states what they can do and need."""
        return self.registry.load(self.engine)

    @model_validator(mode="after")
    def _engine_is_of_the_kind(self) -> EngineSection:
        if not getattr(self.engine_class, self.ability, False):
            verb = self.ability.removeprefix("can_")
            raise ValueError(f"engine={self.engine} cannot {verb}: its class attribute {self.ability} is not True")
        width: int = getattr(self, "tensor_parallel_size", 1)
        if width > 1 and not self.engine_class.tensor_parallel:
            raise ValueError(f"engine={self.engine} runs on one GPU, and tensor_parallel_size={width}")
        return self


class ScoringPool(Pool):
    """Models behind ZeroMQ servers that score what was sampled."""

    rates: ClassVar[bool] = False
    """Whether a model rates whole responses, in tokens of its own, instead of scoring the student's tokens."""

    request_timeout_s: WaitSeconds = Field(
        120.0, description="time after which a replica that has requests and makes no step is given up"
    )
    max_attempts: int = Field(3, ge=1, description="times a request is sent, to other replicas where there are any")
    heartbeat_s: float = Field(1.2, gt=0, le=60, description="interval of heartbeats; three missed put a replica out")

    @model_validator(mode="after")
    def _heartbeats_come_in_time(self) -> ScoringPool:
        if self.heartbeat_s >= self.request_timeout_s:
            raise ValueError(
                f"heartbeat_s={self.heartbeat_s:g}: a step is seen with the next heartbeat, so it is to be below "
                f"request_timeout_s={self.request_timeout_s:g}"
            )
        return self


class Scorer(ScoringPool, Engine, EngineSection):
    """Engines that compute how likely every token of what was sampled is."""

    registry: ClassVar[Registry] = Registry("teacher.engine", SCORING_ENGINES, ENGINE, undecided="torch")
    ability: ClassVar[str] = "can_score"

    engine: EntryName = Field(
        "auto",
        description="what scores: torch, one packed forward pass of transformers' model on one GPU; vllm; auto: torch "
        "where an engine has one GPU and the model is dense attention all through, or unknown to vLLM, and vllm "
        f"otherwise; or {OWN_CLASS}",
    )
    max_top_k: int = Field(
        32768,
        ge=1,
        description="largest K a request may have; the full vocabulary counts too. gkd.teacher.serve on a GPU takes "
        "the fewer tokens a step the more this is",
    )
    max_model_len: int | None = Field(
        None, ge=2, description="longest sequence scored, tokens; null: the run's, in gkd.teacher.serve the "
        "model's positions, with vLLM one less and what fits"
    )  # fmt: skip
    max_num_seqs: int = Field(32, ge=1, description="sequences one engine scores at the same time")
    quantization: str | None = Field(
        None,
        description="weights in fewer bits: a method of vLLM's by its name, such as fp8; null: as the model's files "
        "have them",
    )

    @property
    def engine_class(self) -> Any:
        """The class of the engines; of ``auto`` the one for most models."""
        return self.registry.load(self.engine_for(lambda: True))

    def engine_for(self, torch_is_better: Callable[[], bool]) -> str:
        """Return ``engine``, with ``auto`` decided.

        An engine over several GPUs, or with weights that it quantizes, is vLLM's. On one, ``torch_is_better`` states of
        the model whether torch scores it; only then is that called.
        """
        if self.engine != "auto":
            return self.engine
        alone = self.tensor_parallel_size == 1 and self.quantization is None
        return "torch" if alone and torch_is_better() else "vllm"

    @model_validator(mode="after")
    def _the_engine_quantizes(self) -> Scorer:
        if self.quantization is not None and not self.engine_class.quantizes:
            raise ValueError(
                f"quantization={self.quantization}: engine={self.engine} computes with weights as they are; "
                "engine=vllm quantizes them"
            )
        return self


class Teacher(Scorer):
    """The model that the student is to become like, in a pool of its own or outside the cluster."""

    model: TeacherModel = TeacherModel()
    models: dict[str, str] = Field(
        {},
        description="several teachers: by the value of the column data.teacher_key, directory or locally cached name; "
        "the group's engines are dealt out among them",
    )
    chat_template: str | None = Field(
        None,
        description="how the teacher is prompted: own: by its own tokenizer; student: as the student is; or a Jinja "
        "file; null: student and teacher have to agree",
    )
    server_ip: str | None = Field(
        None, description="host or comma-separated hosts of an external teacher, used instead of a pool; "
        "for gkd.teacher.serve the address to listen on (TRL: teacher_model_server_url)"
    )  # fmt: skip
    server_port: int = Field(
        15555,
        ge=1,
        le=65535,
        description="port of an external teacher, see server_ip (TRL: teacher_model_server_url)",
    )
    key_file: str | None = Field(
        None,
        description="CURVE key shared by server and clients; needed when server_ip is not loopback; null: for "
        "gkd.teacher.serve and its clients on one machine ~/.cache/gkd/teacher.key, otherwise one of the run's own",
    )


class ReferenceModel(Settings):
    """The reference model itself."""

    path: str | None = Field(
        None,
        description="directory or locally cached name; null: the student at its start (verl: ref.model.path; slime: "
        "ref_load)",
    )


class Reference(Scorer):
    """The model that the student is to stay near, where ``algorithm.kl.coef`` is above 0."""

    registry: ClassVar[Registry] = Registry("reference.engine", SCORING_ENGINES, ENGINE, undecided="torch")

    model: ReferenceModel = ReferenceModel()


class RewardModelModel(Settings):
    """The model that gives the reward."""

    path: str | None = Field(
        None,
        description="directory or locally cached name of a model that reward_model.engine takes: classifier one for "
        "sequence classification with one output (verl: reward_model.model_path; OpenRLHF: reward_pretrain)",
    )


class RewardModel(ScoringPool, EngineSection):
    """A model that rates responses: the reward ``reward_model``. One replica a GPU."""

    registry: ClassVar[Registry] = Registry(
        "reward_model.engine", {"classifier": "gkd.inference.classifier:Classifier"}, ENGINE
    )
    ability: ClassVar[str] = "can_rate"
    rates: ClassVar[bool] = True

    engine: EntryName = Field(
        "classifier", description=f"what rates: classifier, transformers' sequence classification, or {OWN_CLASS}"
    )
    model: RewardModelModel = RewardModelModel()
    max_num_seqs: int = Field(32, ge=1, description="sequences one replica rates at the same time")
    max_model_len: int = Field(8192, ge=2, description="longest sequence rated, tokens")


def _require_distinct(names: list[str]) -> list[str]:
    if repeated := [name for name in names if names.count(name) > 1]:
        raise ValueError(f"{repeated[0]} is named more than once")
    return names


class Trainer(ValidationSettings, Pool, OpenSections):
    """The loop, and the actor's pool."""

    registry: ClassVar[Registry] = TRACKERS
    selects: ClassVar[str] = "trackers"

    total_steps: int = Field(100, ge=1, description="steps, each on a batch of its own (TRL's max_steps)")
    batch_size: int = Field(64, ge=1, le=1 << 20, description="prompts a step (verl's train_batch_size)")
    seed: int = Field(0, ge=0, lt=1 << 63, description="seed of data order, sampling and the built-in student")
    save_every: int | None = Field(
        None,
        ge=1,
        description="write a checkpoint every so many steps and at the end; null: by save_minutes alone (TRL: "
        "save_steps; verl: save_freq; slime: save_interval)",
    )
    save_minutes: float | None = Field(
        10.0, gt=0, description="write a checkpoint after so many minutes without one, beside training; null: never"
    )
    save_timeout_s: WaitSeconds = Field(1800.0, description="time writing a checkpoint or the student may take")
    keep_checkpoints: int = Field(
        2,
        ge=1,
        description="newest checkpoints that are kept (TRL's save_total_limit); those by save_minutes take no place "
        "of others",
    )
    restarts: int = Field(
        3,
        ge=0,
        description="how often a run that lost workers which it cannot do without goes on by itself from its newest "
        "checkpoint, in new processes (torchrun: max_restarts)",
    )
    resume: Literal[True, False, "auto"] = Field(
        False,
        description="go on from the newest intact checkpoint in output_dir (TRL: resume_from_checkpoint; verl: "
        "resume_mode); auto: where there is none, begin",
    )
    output_dir: str | None = Field(
        None, description="where the run writes; null: outputs/RECIPE/DATE_TIME (verl: default_local_dir)"
    )
    update_timeout_s: WaitSeconds = Field(
        1800.0, description="time in which the actor, at an update, may begin no micro-batch before the run ends"
    )
    trackers: Annotated[EntryNames, AfterValidator(_require_distinct)] = Field(
        [],
        description="where metrics go besides metrics.jsonl (TRL's report_to, verl's logger): tensorboard, wandb and "
        "mlflow, which are extras (pip install 'gkd[wandb]'), or your own as package.module:name or FILE.py:name; the "
        "settings of each are in trainer.NAME",
    )
    run_name: str | None = Field(
        None,
        min_length=1,
        description="what trackers call the run; null: the last part of output_dir (TRL: run_name; verl: "
        "experiment_name)",
    )
    run_group: str | None = Field(
        None, min_length=1, description="runs that trackers list together; null: none (slime, OpenRLHF: wandb_group)"
    )
    n_logged_samples: int = Field(4, ge=0, description="samples a step in samples.jsonl (TRL's log_completions)")
    n_timeline_steps: int = Field(
        500,
        ge=0,
        description="newest steps in timeline.json, at most 300,000 events (verl's profiler.steps); 0: none",
    )
    n_logged_tokens: int = Field(
        128,
        ge=0,
        description="first response tokens of each logged sample that samples.jsonl has with the log-probabilities of "
        "student and teacher and the teacher's five likeliest, some 100 bytes each; 0: none",
    )

    @model_validator(mode="after")
    def _trackers_take_metrics(self) -> Trainer:
        for name in self.trackers:
            kind = TRACKERS.load(name)
            if not (isinstance(kind, type) and hasattr(kind, "log") and hasattr(kind, "close")):
                raise ValueError(f"trackers: {name} is no class with the methods log and close")
            for method in ("log", "log_samples", "close"):
                if inspect.iscoroutinefunction(getattr(kind, method, None)):
                    raise ValueError(f"trackers: {name}: its {method} is async, and nothing awaits it")
        return self


class Rollout(StudentSampling, Engine, EngineSection):
    """Sampling from the student."""

    registry: ClassVar[Registry] = Registry(
        "rollout.engine",
        {"vllm": "gkd.inference.vllm_sampler:VLLMSampler", "hf": "gkd.inference.hf:HFSampler"},
        ENGINE,
    )
    ability: ClassVar[str] = "can_sample"

    engine: EntryName = Field(
        "vllm",
        description=f"what samples: vllm; hf, transformers' generate, for models unknown to vLLM; or {OWN_CLASS} "
        "(TRL: use_vllm; verl: rollout.name)",
    )
    n: int = Field(1, ge=1, le=1 << 20, description="samples a prompt (TRL's num_generations)")
    timeout_s: WaitSeconds = Field(
        1800.0, description="time without anything sampled or scored after which a batch fails"
    )
    engine_timeout_s: WaitSeconds = Field(
        300.0, description="an engine that has work and makes no forward pass for this time hangs: "
        "it is ended, and the others do its work"
    )  # fmt: skip

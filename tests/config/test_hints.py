"""Hints for settings that are not known: by meaning, then by spelling within a section."""

from __future__ import annotations

import re
from collections import defaultdict
from pathlib import Path

import pytest

from gkd.config import hint, settings
from gkd.config.base import GROUP_OF
from gkd.config.compose import compose
from gkd.config.describe import describe_all
from gkd.config.names import ALWAYS, EARLIER, ELSEWHERE, SECTIONS
from gkd.errors import ConfigError

DOTTED = re.compile(r"\b[a-z][a-z0-9_]*(?:\.(?:NAME|[a-z][a-z0-9_]*))+\b")
NO_CHOICE = {name: answer for names, answer in ALWAYS.items() for name in names.split()}
NOT_SETTINGS = {"gkd.main", "package.module", "file.py"}


def test_every_name_in_a_hint_is_a_setting() -> None:
    known = settings()
    assert len(ELSEWHERE) >= 60
    for theirs, ours in {**ELSEWHERE, **SECTIONS}.items():
        names = [name for name in DOTTED.findall(ours.replace("FILE.py", "")) if name not in NOT_SETTINGS]
        assert names or theirs in {**SECTIONS, **NO_CHOICE}, theirs
        assert set(names) <= set(known), theirs
        assert theirs not in known, theirs


SYSTEM = r"(?:TRL|verl|slime|OpenRLHF|prime-rl|torchrun|transformers)\b"
WITHOUT_A_TERM = {
    "data.teacher_key": "verl's term is the same; reward_fn_key chooses a reward, which nothing here does",
}
"""Settings whose descriptions name no other system's term, and why."""


def has_term(description: str, theirs: str) -> bool:
    """Return whether a description names ``theirs``, or its last part, as a system's: ``(TRL: max_steps; ...``."""
    terms = "|".join(re.escape(name).replace("_", "[._]") for name in {theirs, theirs.rpartition(".")[2]})
    return re.search(rf"\b{SYSTEM}[^;)]*(?<![\w.])(?:\w+\.)*(?:{terms})\b", description) is not None


def ends_alike(ours: str, theirs: str) -> bool:
    """Return whether the last word of ``ours`` ends their name as well, as ``dtype`` does ``torch_dtype``."""
    return re.search(rf"(^|[._]){ours.rpartition('.')[2]}$", theirs) is not None


def settings_meant(answer: str) -> list[str]:
    """Return the settings that an answer begins with, one or several joined by "and"; the rest of it is a remark."""
    meant = re.match(rf"(?:{DOTTED.pattern}(?: and )?)*", answer)
    return DOTTED.findall(meant[0]) if meant else []


def test_a_description_names_another_systems_term_where_it_is_another_word() -> None:
    descriptions = {setting.name: setting.meaning for setting in describe_all()}
    terms: defaultdict[str, list[str]] = defaultdict(list)
    for theirs in ELSEWHERE.keys() - EARLIER.keys():
        for ours in settings_meant(ELSEWHERE[theirs]):
            terms[ours].append(theirs)
    assert len(terms) > 80
    without = [
        ours
        for ours, theirs in terms.items()
        if not all(ends_alike(ours, name) for name in theirs)
        and not any(has_term(descriptions[ours], name) for name in theirs)
    ]
    assert sorted(without) == sorted(WITHOUT_A_TERM)


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        # TRL
        ("learning_rate", "actor.lr"),
        ("num_generations", "rollout.n"),
        ("max_new_tokens", "rollout.max_response_length"),
        ("max_completion_length", "rollout.max_response_length"),
        ("trainer.max_steps", "trainer.total_steps"),
        ("lora_r", "actor.lora.r"),
        ("lmbda", "algorithm.on_policy_share"),
        ("teacher_model_name_or_path", "teacher.model.path"),
        ("report_to", "trainer.trackers"),
        ("--learning-rate", "actor.lr"),
        # verl
        ("actor_rollout_ref.model.path", "model.path"),
        ("actor_rollout_ref.model.lora_rank", "actor.lora.r"),
        ("actor_rollout_ref.actor.optim.lr", "actor.lr"),
        ("actor_rollout_ref.actor.grad_clip", "actor.grad_clip"),
        ("actor_rollout_ref.actor.clip_ratio_high", "algorithm.policy.clip_high"),
        ("actor_rollout_ref.rollout.n", "rollout.n"),
        ("actor_rollout_ref.rollout.temperature", "rollout.temperature"),
        ("actor_rollout_ref.rollout.tensor_model_parallel_size", "rollout.tensor_parallel_size"),
        ("actor_rollout_ref.ref.model.path", "reference.model.path"),
        ("distillation.teacher_models.teacher_model.model_path", "teacher.model.path"),
        ("distillation.teacher_model.model_path", "teacher.model.path"),
        ("distillation.distillation_loss.loss_mode", "algorithm.loss.name"),
        ("distillation.distillation_loss.topk", "algorithm.loss.top_k"),
        ("actor_rollout_ref.actor.optim.betas", "actor.betas"),
        ("algorithm.adv_estimator", "algorithm.advantage.name"),
        ("data.train_batch_size", "trainer.batch_size"),
        ("data.max_response_length", "rollout.max_response_length"),
        ("trainer.logger", "trainer.trackers"),
        ("trainer.test_freq", "trainer.val_every"),
        ("trainer.experiment_name", "trainer.run_name"),
        ("custom_reward_function.path", "reward.functions"),
        ("reward.reward_model.model_path", "reward_model.model.path"),
        ("reward.reward_model.rollout.tensor_model_parallel_size", "reward_model.model.path"),
        ("actor_rollout_ref.rollout.val_kwargs.n", "data.val_sets.NAME.samples"),
        ("actor_rollout_ref.rollout.val_kwargs.top_k", "data.val_sets.NAME.samples"),
        ("actor_rollout_ref.actor.fsdp_config.fsdp_size", "actor.fsdp_size"),
        ("actor_rollout_ref.actor.fsdp_config.param_offload", "cluster.offload"),
        ("algorithm.filter_groups.metric", "algorithm.dynamic_sampling.max_rounds"),
        ("reward.reward_kwargs.overlong_buffer_cfg.len", "algorithm.overlong.buffer"),
        ("algorithm.rollout_correction.rollout_rs", "algorithm.importance_sampling.mask"),
        ("algorithm.rollout_correction.rollout_is", "algorithm.importance_sampling.level"),
        ("algorithm.filter_groups.max_num_gen_batches", "algorithm.dynamic_sampling.max_rounds"),
        ("actor_rollout_ref.rollout.max_tokens", "rollout.max_response_length"),
        ("reward.max_tokens", "reward.judge.max_tokens"),
        ("data.val_max_samples", "data.val_limit"),
        # slime, OpenRLHF, prime-rl
        ("n-samples-per-prompt", "rollout.n"),
        ("eps_clip_high", "algorithm.policy.clip_high"),
        ("wandb.project", "trainer.wandb.project"),
        # earlier versions
        ("reward.length.wanted", "reward.length.target_length"),
        ("reward.cosine.right", "reward.cosine.correct"),
        # misspelt
        ("trainer.total_step", "trainer.total_steps"),
        ("traner.total_steps", "trainer.total_steps"),
        ("algorithm.los.beta", "algorithm.loss.beta"),
        ("total_steps", "trainer.total_steps"),
        ("trainer.lr", "actor.lr"),
        ("plcement", "placement"),
    ],
)
def test_a_hint_names_the_setting_that_is_meant(theirs: str, ours: str) -> None:
    text = hint(theirs, [*settings(), "recipe", "placement"])
    assert re.match(rf" \([\w ]+:? {re.escape(ours)}\b(?!\.)", text), text


@pytest.mark.parametrize("theirs", ["logging_steps", "trainer.val_before_train", "actor_rollout_ref.actor.strategy"])
def test_a_name_for_what_is_no_choice_is_answered_with_what_is_so(theirs: str) -> None:
    answer = next(NO_CHOICE[own] for own in NO_CHOICE if theirs.endswith(own))
    assert hint(theirs, settings()) == f" (here: {answer})"


def test_a_setting_that_has_been_is_answered_with_one_that_is() -> None:
    """A new setting goes into the file, so that it is not forgotten once it has another name."""
    lines = Path(__file__).with_name("setting_names.txt").read_text(encoding="utf-8").splitlines()
    names = [line for line in lines if not line.startswith("#")]
    assert names == sorted({*names, *settings()})
    gone = {name: hint(name, settings()) for name in names if name not in settings()}
    assert len(gone) > 20
    new = {name: next((EARLIER[end] for end in ends_of(name) if end in EARLIER), None) for name in gone}
    assert gone == {name: f" (here: {answer})" for name, answer in new.items()}


def ends_of(name: str) -> list[str]:
    """Return ``a.b.c``, ``b.c`` and ``c`` of ``a.b.c``."""
    parts = name.split(".")
    return [".".join(parts[place:]) for place in range(len(parts))]


@pytest.mark.parametrize("group", GROUP_OF)
def test_a_group_is_colocated_by_its_own_setting(group: str) -> None:
    assert DOTTED.findall(hint(f"{group}.share_with", settings())) == [f"{group}.colocate_with"]


@pytest.mark.parametrize("name", [name for name in EARLIER if "." in name])
def test_an_earlier_name_ends_a_run_with_the_new_one(name: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(f"(here: {EARLIER[name]})")):
        compose([f"+{name.replace('NAME', 'own')}=1"])


@pytest.mark.parametrize(
    ("name", "setting"),
    [
        ("actor.entropy_coeff", "algorithm.policy.clip_high"),
        ("clip_ratio_c", "algorithm.policy.clip_low"),
        ("n_questions", "evaluate.sets.NAME.limit"),
        ("difficulty", "evaluate.sets.NAME.difficulties"),
        ("gpu_mode", "evaluate.mode"),
        ("--gpu-ids", "rollout.gpus"),
        ("algorithm.use_kl_in_reward", "algorithm.kl.coef"),
        ("rollout.log_prob_micro_batch_size_per_gpu", "actor.max_tokens_per_micro_batch"),
    ],
)
def test_what_other_scripts_always_set_is_answered(name: str, setting: str) -> None:
    assert setting in DOTTED.findall(hint(name, settings()))


def test_a_meaning_that_depends_on_the_trainer_names_both() -> None:
    assert {"algorithm.loss.beta", "algorithm.kl.coef"} <= set(DOTTED.findall(hint("beta", settings())))
    assert DOTTED.findall(hint("temperature", settings())) == ["rollout.temperature", "algorithm.loss.temperature"]


@pytest.mark.parametrize(
    "name",
    [
        "critic.model.path", "critic.optim.lr", "critic_warmup", "x.path", "actor_rollout_ref.model", "nothing.alike",
        "zzz", "delta", "sync_ref_model", "vllm_server_port", "data.image_key",
    ],
)  # fmt: skip
def test_what_means_something_else_is_no_hint(name: str) -> None:
    text = hint(name, settings())
    assert "?" not in text
    assert not {"model.path", "teacher.model.path", "actor.lr"} & set(DOTTED.findall(text))


def test_a_section_of_a_file_is_named_down_to_its_first_setting(tmp_path_factory: pytest.TempPathFactory) -> None:
    file = tmp_path_factory.mktemp("verl") / "verl.yaml"
    file.write_text("actor_rollout_ref: {model: {path: /x}}\n")
    with pytest.raises(ConfigError, match=r"^unknown setting actor_rollout_ref.model.path \(here: model.path\)$"):
        compose([str(file)])

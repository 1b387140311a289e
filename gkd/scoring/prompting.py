"""Each teacher's way of making prompts: from its files, or from the handshake of an external one."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from gkd.config import Teacher, user_path
from gkd.config.groups import model_setting
from gkd.data.prompts import PromptSet
from gkd.data.rendering import Renderer, Rendering, check_same_prompts, with_teacher_ids
from gkd.data.tokenizer import load_tokenizer, tokenizer_hash
from gkd.errors import ConfigError
from gkd.scoring.address import external_addresses, external_key
from gkd.scoring.client import ScoringClient


def teacher_prompts(
    teacher: Teacher,
    models: Mapping[str, str],
    tokenizer: Any,
    sets: Mapping[str, PromptSet],
    longest: int,
    kwargs: Mapping[str, Any] | None = None,
) -> dict[str, PromptSet]:
    """Return ``sets`` with prompts for the teachers as ``teacher.chat_template`` wants them.

    ``models``: directories of the teachers by name; none where it is an external one. ``tokenizer``: the student's.
    ``longest``: tokens a prompt may have. ``kwargs``: ``data.chat_template_kwargs``. Raises ConfigError where student
    and teacher are prompted differently and no setting allows it, or where the teacher's template cannot be used;
    ScorerUnavailable where an external teacher does not answer.
    """
    choice = teacher.chat_template
    if choice == "student":
        return dict(sets)
    renderers = {
        name: replace(renderer, kwargs=kwargs or {})
        for name, renderer in _renderers(teacher, models, tokenizer).items()
    }
    if choice is None:
        for prompts in sets.values():
            check_same_prompts(prompts.prompts, renderers)
        return dict(sets)
    if choice != "own":
        template = _read(choice)
        renderers = {
            name: replace(
                renderer,
                setting=f"teacher.chat_template={choice}",
                rendering=replace(renderer.rendering, chat_template=template, tool_template=None),
            )
            for name, renderer in renderers.items()
        }
    return {name: with_teacher_ids(prompts, renderers, longest) for name, prompts in sets.items()}


def _renderers(teacher: Teacher, models: Mapping[str, str], tokenizer: Any) -> dict[str, Renderer]:
    if not models:
        # Its tokens mean what the student's mean, so the student's tokenizer makes them of its text.
        setting = f"teacher.server_ip={teacher.server_ip}"
        return {"teacher": Renderer(setting, tokenizer, _read_rendering(teacher, tokenizer))}
    renderers = {}
    for name, path in models.items():
        setting = model_setting(name)
        teacher_tokenizer = load_tokenizer(path, setting)
        renderers[name] = Renderer(f"{setting}={path}", teacher_tokenizer, Rendering.from_tokenizer(teacher_tokenizer))
    return renderers


def _read_rendering(teacher: Teacher, tokenizer: Any) -> Rendering:
    """Return the rendering of an external teacher's servers, which has to be one."""
    client = ScoringClient(
        external_addresses(teacher),
        tokenizer_hash(tokenizer),
        key=external_key(teacher),
        request_timeout_s=teacher.request_timeout_s,
        heartbeat_s=teacher.heartbeat_s,
    )
    try:
        renderings = {address: welcome.rendering for address, welcome in client.connect().items()}
    finally:
        client.close()
    (first, rendering), *others = renderings.items()
    for address, other in others:
        if other != rendering:
            raise ConfigError(f"teacher.server_ip: the teachers at {first} and {address} are prompted differently")
    if rendering is None:
        raise ConfigError(
            f"the teacher at {first} does not state how it is prompted: set teacher.chat_template=student"
        )
    return rendering


def _read(path: str) -> str:
    try:
        return user_path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"teacher.chat_template={path}: is neither own, student, nor a readable file ({reason})"
        ) from None

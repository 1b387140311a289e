"""Each teacher's way of making prompts: from its files, or from what an external one says of itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from gkd.config import Teacher
from gkd.data.prompts import PromptSet
from gkd.data.rendering import Renderer, Rendering, check_same_prompts, with_teacher_ids
from gkd.data.tokenizer import load_tokenizer, tokenizer_hash
from gkd.errors import ConfigError
from gkd.scoring.address import external_addresses, external_key
from gkd.scoring.client import ScoringClient


def teacher_prompts(
    teacher: Teacher, models: Mapping[str, str], tokenizer: Any, found: Mapping[str, PromptSet], longest: int
) -> dict[str, PromptSet]:
    """The prompt sets in ``found``, for the teachers that ``teacher.chat_template`` says.

    ``models``: directories of the teachers by name; none where it is an external one, which is asked. ``tokenizer``:
    the student's. ``longest``: tokens a prompt may have. Raises ConfigError where student and teacher are prompted
    differently and nothing is said about it, or where the teacher's template cannot be used; ScorerUnavailable where
    an external teacher does not answer.
    """
    wanted = teacher.chat_template
    if wanted == "student":
        return dict(found)
    renderers = _renderers(teacher, models, tokenizer)
    if wanted is None:
        for prompts in found.values():
            check_same_prompts(prompts.prompts, renderers)
        return dict(found)
    if wanted != "own":
        template = _read(wanted)
        renderers = {
            name: replace(
                renderer,
                setting=f"teacher.chat_template={wanted}",
                rendering=replace(renderer.rendering, chat_template=template),
            )
            for name, renderer in renderers.items()
        }
    return {name: with_teacher_ids(prompts, renderers, longest) for name, prompts in found.items()}


def _renderers(teacher: Teacher, models: Mapping[str, str], tokenizer: Any) -> dict[str, Renderer]:
    if not models:
        # Its tokens mean what the student's mean, so the student's tokenizer makes them of its text.
        setting = f"teacher.server_ip={teacher.server_ip}"
        return {"teacher": Renderer(setting, tokenizer, _external(teacher, tokenizer))}
    found = {}
    for name, path in models.items():
        _, _, which = name.partition(":")
        own = load_tokenizer(path, "teacher.model.path")
        setting = f"teacher.models.{which}={path}" if which else f"teacher.model.path={path}"
        found[name] = Renderer(setting, own, Rendering.of(own))
    return found


def _external(teacher: Teacher, tokenizer: Any) -> Rendering:
    """What the servers of an external teacher say, which has to be one thing."""
    client = ScoringClient(
        external_addresses(teacher),
        tokenizer_hash(tokenizer),
        key=external_key(teacher),
        request_timeout_s=teacher.request_timeout_s,
        heartbeat_s=teacher.heartbeat_s,
    )
    try:
        found = {address: welcome.rendering for address, welcome in client.connect().items()}
    finally:
        client.close()
    (first, rendering), *others = found.items()
    for address, other in others:
        if other != rendering:
            raise ConfigError(f"teacher.server_ip: the teachers at {first} and {address} are prompted differently")
    if rendering is None:
        raise ConfigError(f"the teacher at {first} does not say how it is prompted: set teacher.chat_template=student")
    return rendering


def _read(path: str) -> str:
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(
            f"teacher.chat_template={path}: is neither own, student, nor a readable file ({reason})"
        ) from None

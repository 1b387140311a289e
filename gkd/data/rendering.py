"""What a model's tokenizer makes of a prompt, and whether student and teacher see the same.

Two models of one vocabulary may have different chat templates, or put different special tokens around plain text. A
teacher that scores responses to prompts such as it has never seen teaches what it does not know.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from gkd.data.layouts import template_variables
from gkd.data.prompts import TOKENISED_AT_ONCE, PromptSet
from gkd.data.templates import begins_itself, chat_template_of, special_ids_around
from gkd.errors import ConfigError, one_line
from gkd.types import Int32, Prompt, teacher_of

COMPARED = 64  # prompts of a file that are compared
SHOWN, BEFORE = 120, 40  # characters of a text in an error, and how many of them precede the first difference


@dataclass(frozen=True, slots=True)
class Rendering:
    """A chat template (Jinja), the special tokens that it may name, and the ids ``before`` and ``after`` plain text.

    ``tool_template``: the one for prompts with tools, where that is another.
    """

    chat_template: str | None
    special_tokens: dict[str, str]
    before: list[int]
    after: list[int]
    tool_template: str | None = None

    @staticmethod
    def from_tokenizer(tokenizer: Any) -> Rendering:
        """Return the rendering of a transformers tokenizer."""
        special_tokens = dict(tokenizer.special_tokens_map)
        template, around = chat_template_of(tokenizer), special_ids_around(tokenizer)
        return Rendering(template, special_tokens, *around, chat_template_of(tokenizer, for_tools=True))


@dataclass(frozen=True, slots=True)
class Renderer:
    """Makes the prompts of the model that ``setting`` names.

    ``tokenizer``: one with that model's ids. ``kwargs``: what its chat template is given beside the messages.
    """

    setting: str
    tokenizer: Any
    rendering: Rendering
    kwargs: Mapping[str, Any] = field(default_factory=dict)

    def text(self, prompt: Prompt) -> str:
        """Return the prompt as text, without what comes before and after plain text. Raises ConfigError."""
        if prompt.messages is None:
            return prompt.text
        template = self.rendering.tool_template if prompt.tools else None
        if (template := template or self.rendering.chat_template) is None:
            raise ConfigError(
                f"the data holds messages, but the tokenizer of {self.setting} has no chat template: "
                "teacher.chat_template=student has the teacher see the student's, or a file with one"
            )
        from transformers.utils.chat_template_utils import render_jinja_template

        try:
            (text,), _ = render_jinja_template(
                [list(prompt.messages)],
                chat_template=template,
                add_generation_prompt=True,
                **self.rendering.special_tokens,
                **template_variables(self.kwargs, prompt.tools),
            )
        except Exception as error:  # a template computes with what the messages hold, and raises what it meets
            reason = one_line(error)
            raise ConfigError(f"the chat template of {self.setting} refuses prompt {prompt.id}: {reason}") from None
        return str(text)

    def token_ids(self, prompts: Sequence[Prompt]) -> list[Int32]:
        """Return token ids [P] of each prompt. Raises ConfigError."""
        parts = [prompts[i : i + TOKENISED_AT_ONCE] for i in range(0, len(prompts), TOKENISED_AT_ONCE)]
        return [token_ids for part in parts for token_ids in self._tokenise(part)]

    def _tokenise(self, prompts: Sequence[Prompt]) -> list[Int32]:
        texts = [self.text(prompt) for prompt in prompts]
        token_ids = self.tokenizer(texts, add_special_tokens=False, verbose=False)["input_ids"]
        around, bos = self.rendering, self.rendering.special_tokens.get("bos_token")
        complete = [p.messages is not None or begins_itself(p.text, bos) for p in prompts]
        return [
            np.asarray(ids if has_all else [*around.before, *ids, *around.after], dtype=np.int32)
            for has_all, ids in zip(complete, token_ids, strict=True)
        ]


def check_same_prompts(prompts: Sequence[Prompt], teachers: Mapping[str, Renderer]) -> None:
    """Compare the first of ``prompts`` with what the teacher of each would have made of them.

    ``teachers``: by name, see :func:`gkd.types.teacher_of`. Raises ConfigError, showing both texts, at the first that
    differs.
    """
    for name, teacher in teachers.items():
        teacher_prompts = [prompt for prompt in prompts if teacher_of(prompt) == name][:COMPARED]
        for prompt, ids in zip(teacher_prompts, teacher.token_ids(teacher_prompts), strict=True):
            if not np.array_equal(prompt.token_ids, ids):
                text, other_text = _cut_differing_texts(prompt, ids, teacher)
                raise ConfigError(
                    f"the student and {teacher.setting} are prompted differently: of prompt {prompt.id} the student "
                    f"sees {text}, the teacher would see {other_text}; say which is meant: teacher.chat_template=own, "
                    "student, or a Jinja file"
                )


def with_teacher_ids(prompts: PromptSet, teachers: Mapping[str, Renderer], longest: int) -> PromptSet:
    """Return the prompts with their own teacher's rendering, without those that it gives more than ``longest`` tokens.

    Raises ConfigError where none is left.
    """
    by_id: dict[int, Int32] = {}
    for name, teacher in teachers.items():
        teacher_prompts = [prompt for prompt in prompts.prompts if teacher_of(prompt) == name]
        by_id |= zip((prompt.id for prompt in teacher_prompts), teacher.token_ids(teacher_prompts), strict=True)
    rendered = [
        prompt if np.array_equal(prompt.token_ids, by_id[prompt.id]) else replace(prompt, teacher_ids=by_id[prompt.id])
        for prompt in prompts.prompts
    ]
    return drop_long(PromptSet(rendered, prompts.n_too_long), longest)


def drop_long(prompts: PromptSet, longest: int) -> PromptSet:
    """Return the prompts without those that the teacher sees as more than ``longest`` tokens.

    Raises ConfigError where none is left.
    """
    lengths = [len(prompt.teacher_prompt_ids) for prompt in prompts.prompts]
    short = [prompt for prompt, length in zip(prompts.prompts, lengths, strict=True) if length <= longest]
    if lengths and not short:
        raise ConfigError(
            f"every prompt is longer than {longest} tokens (data.max_prompt_length) as the teacher sees it "
            f"(teacher.chat_template), the shortest has {min(lengths)} tokens"
        )
    return PromptSet(short, prompts.n_too_long + len(lengths) - len(short))


def _cut_differing_texts(prompt: Prompt, teacher_ids: Int32, teacher: Renderer) -> tuple[str, str]:
    """Return both texts from shortly before their first difference; token ids where only those differ."""
    decode = teacher.tokenizer.decode
    texts = [decode(ids.tolist(), skip_special_tokens=False) for ids in (prompt.token_ids, teacher_ids)]
    if texts[0] == texts[1]:
        texts = [" ".join(map(str, ids)) for ids in (prompt.token_ids, teacher_ids)]
    pairs = zip(*texts, strict=False)
    differ = next((i for i, (a, b) in enumerate(pairs) if a != b), min(map(len, texts)))
    start = max(0, differ - BEFORE)
    shown = [
        ("..." if start else "") + repr(text[start : start + SHOWN]) + ("..." if len(text) > start + SHOWN else "")
        for text in texts
    ]
    return shown[0], shown[1]

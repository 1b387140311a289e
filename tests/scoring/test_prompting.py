"""Student and teacher are prompted alike, or as the user says."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from tokenizers import processors

from gkd.config import Data, Teacher, load
from gkd.data.prompts import PromptSet, load_prompts
from gkd.data.rendering import Renderer, Rendering
from gkd.errors import ConfigError
from gkd.scoring.prompting import teacher_prompts
from tests.data.models import TEMPLATE, word_tokenizer
from tests.error_text import contains_in_order
from tests.scoring.conftest import Serve
from tests.scoring.table import KEY

OTHER = (
    "{{ bos_token }} {% for m in messages %}b {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}c {% endif %}"
)


def tokenizer(template: str | None = None, prepends: str = "", **special: str) -> Any:
    """Of one vocabulary, whatever the template."""
    made = word_tokenizer(template=template)
    for name, token in special.items():
        setattr(made, name, token)
    if prepends:
        single = [(prepends, made.convert_tokens_to_ids(prepends))]
        made._tokenizer.post_processor = processors.TemplateProcessing(single=f"{prepends} $A", special_tokens=single)
    return made


def prompts(student: Any, tmp_path: Path, rows: Sequence[str] = ("a d", "d", "a a a a")) -> PromptSet:
    """Messages where the student has a chat template, text where it has none."""
    file = tmp_path / "data.jsonl"
    chat = '{{"messages": [{{"role": "user", "content": "{}"}}], "source": "{}"}}\n'
    row = '{{"prompt": "{}", "source": "{}"}}\n' if student.chat_template is None else chat
    file.write_text("".join(row.format(text, "xy"[i % 2]) for i, text in enumerate(rows)))
    return load_prompts([str(file)], Data(max_prompt_length=100), student)


def made(student: Any, teacher: Any, tmp_path: Path, chat_template: str | None, longest: int = 100) -> PromptSet:
    teacher.save_pretrained(tmp_path / "teacher")
    settings, models = Teacher(chat_template=chat_template), {"teacher": str(tmp_path / "teacher")}
    return teacher_prompts(settings, models, student, {"train": prompts(student, tmp_path)}, longest)["train"]


def test_a_teachers_tokenizer_is_given_a_thousand_texts_at_a_time(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """What it makes of a million takes 13 GB."""
    student, sizes = tokenizer(TEMPLATE), []
    rows = prompts(student, tmp_path, ["a d", "d"] * 1_200)
    own = type(student).__call__

    def count(self: Any, texts: list[str], **settings: Any) -> Any:
        sizes.append(len(texts))
        return own(self, texts, **settings)

    renderer = Renderer("teacher.model.path", student, Rendering.from_tokenizer(tokenizer(OTHER, bos_token="d")))
    monkeypatch.setattr(type(student), "__call__", count)
    ids = renderer.token_ids(rows.prompts)
    assert sizes == [1_000, 1_000, 400]
    assert len(ids) == 2_400 and [i.tolist() for i in ids[:2]] == [i.tolist() for i in ids[-2:]] != [[], []]


def test_a_teachers_template_is_given_the_same_variables(tmp_path: Path) -> None:
    student, teacher = tokenizer(TEMPLATE), tokenizer(TEMPLATE + "{% if brief %} d{% endif %}")
    teacher.save_pretrained(tmp_path / "teacher")
    for brief, ending in ((True, "<assistant> d"), (False, "<assistant>")):
        prompt_sets = teacher_prompts(
            Teacher(chat_template="own"),
            {"teacher": str(tmp_path / "teacher")},
            student,
            {"train": prompts(student, tmp_path)},
            100,
            {"brief": brief},
        )
        assert all(text.endswith(ending) for text in seen(prompt_sets["train"], teacher))


def seen(prompt_set: PromptSet, model: Any) -> list[str]:
    return [model.decode(prompt.teacher_prompt_ids.tolist()) for prompt in prompt_set.prompts]


@pytest.mark.parametrize("template", [None, TEMPLATE])
def test_prompts_that_are_the_same_stay_as_they_are(tmp_path: Path, template: str | None) -> None:
    prompt_set = made(tokenizer(template), tokenizer(template), tmp_path, None)
    assert len(prompt_set.prompts) == 3 and all(prompt.teacher_ids is None for prompt in prompt_set.prompts)


def test_different_templates_are_refused_with_both_texts(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        made(tokenizer(TEMPLATE), tokenizer(OTHER), tmp_path, None)
    text = str(caught.value)
    assert contains_in_order(text, "student", "'<user> a d <assistant>'", "teacher", "'b a d c'")
    assert f"teacher.model.path={tmp_path / 'teacher'}" in text and "teacher.chat_template=own, student, or" in text
    assert "\n" not in text


def test_the_texts_are_shown_around_where_they_differ(tmp_path: Path) -> None:
    long = "a " * 80
    with pytest.raises(ConfigError) as caught:
        made(tokenizer(long + TEMPLATE), tokenizer(long + OTHER), tmp_path, None)
    assert "<user> a d" in str(caught.value) and "b a d c" in str(caught.value)
    assert len(str(caught.value)) < 500


def test_special_tokens_around_plain_text_are_compared_too(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"'a d', .*'<eos> a d'"):
        made(tokenizer(), tokenizer(prepends="<eos>"), tmp_path, None)
    prompt_set = made(tokenizer(), tokenizer(prepends="<eos>"), tmp_path, "own")
    assert seen(prompt_set, tokenizer()) == ["<eos> a d", "<eos> d", "<eos> a a a a"]


def test_text_that_begins_itself_is_the_same_to_a_teacher_of_the_same_tokenizer(tmp_path: Path) -> None:
    own = tokenizer(prepends="<eos>", bos_token="<eos>")
    own.save_pretrained(tmp_path / "teacher")
    loaded = prompts(own, tmp_path, ["<eos> a d", "d"])
    for chat_template in (None, "own"):
        models = {"teacher": str(tmp_path / "teacher")}
        sets = teacher_prompts(Teacher(chat_template=chat_template), models, own, {"train": loaded}, 100)
        assert seen(sets["train"], own) == ["<eos> a d", "<eos> d"]


def test_own_is_what_the_teachers_tokenizer_makes_of_the_messages(tmp_path: Path) -> None:
    student, teacher = tokenizer(TEMPLATE), tokenizer(OTHER, bos_token="<system>")
    prompt_set = made(student, teacher, tmp_path, "own")
    for prompt in prompt_set.prompts:
        expected = teacher.apply_chat_template(list(prompt.messages), add_generation_prompt=True)["input_ids"]
        assert prompt.teacher_prompt_ids.tolist() == expected
        assert prompt.token_ids.tolist() != expected, "the student is prompted as before"
    assert seen(prompt_set, student)[0] == "<system> b a d c"


def test_student_keeps_the_students_rendering(tmp_path: Path) -> None:
    prompt_set = made(tokenizer(TEMPLATE), tokenizer(OTHER), tmp_path, "student")
    assert seen(prompt_set, tokenizer())[0] == "<user> a d <assistant>"


def test_a_file_is_a_template(tmp_path: Path) -> None:
    (tmp_path / "chat.jinja").write_text("{{ eos_token }} {{ messages[0]['content'] }} d")
    prompt_set = made(tokenizer(TEMPLATE), tokenizer(), tmp_path, str(tmp_path / "chat.jinja"))
    assert seen(prompt_set, tokenizer())[0] == "<eos> a d d"
    for missing in ("/no.jinja", "~nobody-of-this-name/no.jinja"):
        with pytest.raises(ConfigError, match=rf"chat_template={missing}: .*\(No"):
            made(tokenizer(TEMPLATE), tokenizer(), tmp_path, missing)
    (tmp_path / "chat.jinja").write_text("{{ messages[0]['content'] | nothing }}")
    with pytest.raises(ConfigError, match=r"teacher\.chat_template=\S+ .*prompt 0: No filter"):
        made(tokenizer(TEMPLATE), tokenizer(), tmp_path, str(tmp_path / "chat.jinja"))


@pytest.mark.parametrize("chat_template", [None, "own"])
def test_messages_for_a_teacher_without_a_template_are_refused(tmp_path: Path, chat_template: str | None) -> None:
    with pytest.raises(ConfigError, match=r"teacher\.chat_template=student"):
        made(tokenizer(TEMPLATE), tokenizer(), tmp_path, chat_template)


def test_what_is_too_long_for_the_teacher_is_left_out(tmp_path: Path) -> None:
    student, teacher = tokenizer(TEMPLATE), tokenizer("a a a " + OTHER)
    prompt_set = made(student, teacher, tmp_path, "own", longest=7)
    assert seen(prompt_set, student) == ["a a a b a d c", "a a a b d c"] and prompt_set.n_too_long == 1
    with pytest.raises(ConfigError, match=r"every prompt .*\b6 tokens"):
        made(student, teacher, tmp_path, "own", longest=5)


def test_each_prompt_is_its_own_teachers(tmp_path: Path) -> None:
    student, models = tokenizer(TEMPLATE), {}
    for name, template in (("x", OTHER), ("y", TEMPLATE)):
        tokenizer(template).save_pretrained(tmp_path / name)
        models[f"teacher:{name}"] = str(tmp_path / name)
    prompts(student, tmp_path)
    data = Data(max_prompt_length=100, teacher_key="source")
    sets = {"train": load_prompts([str(tmp_path / "data.jsonl")], data, student)}
    with pytest.raises(ConfigError, match=f"student and teacher.models.x={tmp_path / 'x'} "):
        teacher_prompts(Teacher(), models, student, sets, 100)
    prompt_set = teacher_prompts(Teacher(chat_template="own"), models, student, sets, 100)["train"]
    assert seen(prompt_set, student) == ["b a d c", "<user> d <assistant>", "b a a a a c"]


@pytest.mark.parametrize("template", [None, OTHER])
def test_an_external_teacher_states_its_rendering(serve: Serve, tmp_path: Path, template: str | None) -> None:
    from gkd.data.tokenizer import tokenizer_hash

    student = tokenizer(TEMPLATE if template else None)
    teacher = tokenizer(template, prepends="<eos>", bos_token="<system>")
    server = serve(tokenizer_hash=tokenizer_hash(student), rendering=Rendering.from_tokenizer(teacher)).server
    key = tmp_path / "key"
    key.write_text(f'public-key = "{KEY.public.decode()}"\nsecret-key = "{KEY.secret.decode()}"\n')
    external = {"server_ip": server.address.removeprefix("tcp://"), "key_file": str(key), "request_timeout_s": 20}
    sets = {"train": prompts(student, tmp_path)}
    theirs = "<system> b a d c" if template else "<eos> a d"
    with pytest.raises(ConfigError, match=f"teacher.server_ip=127.*'{theirs}'"):
        teacher_prompts(Teacher(**external), {}, student, sets, 100)
    prompt_set = teacher_prompts(Teacher(**external, chat_template="own"), {}, student, sets, 100)["train"]
    assert seen(prompt_set, student)[0] == theirs
    for prompt in prompt_set.prompts:
        np.testing.assert_array_equal(prompt.teacher_prompt_ids, own_ids(teacher, prompt))


def test_external_teachers_that_are_prompted_differently_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which of them answers is left to chance."""
    renderings = [Rendering.from_tokenizer(tokenizer(template)) for template in (TEMPLATE, OTHER)]
    there = {f"tcp://h{n}:1": SimpleNamespace(rendering=one) for n, one in enumerate(renderings)}
    client = SimpleNamespace(connect=lambda: there, close=lambda: None)
    monkeypatch.setattr("gkd.scoring.prompting.ScoringClient", lambda *_, **__: client)
    monkeypatch.setattr("gkd.scoring.prompting.external_key", lambda _: None)
    teacher = Teacher(server_ip="h0:1,h1:1", chat_template="own")
    with pytest.raises(ConfigError, match=r"tcp://h0:1 and tcp://h1:1"):
        teacher_prompts(teacher, {}, tokenizer(TEMPLATE), {}, 100)
    there["tcp://h1:1"] = there["tcp://h0:1"]
    assert teacher_prompts(teacher, {}, tokenizer(TEMPLATE), {}, 100) == {}


def own_ids(teacher: Any, prompt: Any) -> list[int]:
    if prompt.messages is None:
        return list(teacher(prompt.text)["input_ids"])
    return list(teacher.apply_chat_template(list(prompt.messages), add_generation_prompt=True)["input_ids"])


def test_a_template_without_a_teacher_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"teacher\.chat_template=own .*algorithm\.name=grpo"):
        load({"algorithm": {"name": "grpo"}, "teacher": {"chat_template": "own"}})

"""What engines are asked: a strategy's own prompts, as the set puts its questions."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gkd.config.eval_set import EvalSet
from gkd.evaluation.engines import make_prompt
from gkd.evaluation.questions import Question, load_questions
from gkd.recipes.sort_digits.sorting import make_tokenizer
from tests.data.models import TEMPLATE, word_tokenizer


def ask(tmp_path: Path, prompt: str, tokenizer: Any, **settings: Any) -> Question:
    file = tmp_path / "x.jsonl"
    file.write_text(json.dumps({"prompt": prompt, "answer": "c"}))
    eval_set = EvalSet(files=[str(file)], answer_key="answer", **settings)
    return load_questions("letters", eval_set, tokenizer, 64).questions[0]


def test_a_strategys_prompts_are_given_the_sets_variables_of_the_chat_template(tmp_path: Path) -> None:
    """Else a model would think in every prompt but the first, however the set has it."""
    tokenizer = word_tokenizer(template=TEMPLATE + "{% if not enable_thinking %}d {% endif %}")
    for thinking, end in ((False, " d"), (True, "")):
        kwargs = {"enable_thinking": thinking}
        question = ask(tmp_path, "a", tokenizer, apply_chat_template=True, chat_template_kwargs=kwargs)
        assert tokenizer.decode(question.prompt.token_ids) == f"<user> a <assistant>{end}"
        for prompt in ("b", [{"role": "user", "content": "b"}]):
            made = make_prompt(question, prompt, tokenizer)
            assert tokenizer.decode(made.token_ids) == f"<user> b <assistant>{end}"


def test_a_strategys_text_has_the_special_tokens_that_questions_have(tmp_path: Path) -> None:
    tokenizer = make_tokenizer()
    for text in ("3 1 =", "<bos> 3 1 ="):
        question = ask(tmp_path, text, tokenizer)
        made = make_prompt(question, f"{text} 1", tokenizer)
        assert made.token_ids.tolist() == [*question.prompt.token_ids.tolist(), tokenizer.convert_tokens_to_ids("1")]

"""Replies of engines; what these sample is chosen here."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np

from gkd.config import load
from gkd.data.model_info import ModelInfo
from gkd.evaluation.engines import EngineReplies, LocalModel
from gkd.evaluation.questions import Question
from gkd.evaluation.strategies import Reply
from gkd.types import Prompt, Sample, Sampling
from tests.data.models import WORDS, word_tokenizer


def test_a_reply_ends_with_the_text_that_ended_it() -> None:
    """Though the token by which that was complete has more."""
    tokenizer = word_tokenizer()
    rollout: Any = None  # which hands requests to engines
    source = EngineReplies(load({}), LocalModel("m", "", "f", tokenizer, ModelInfo(9, None, [1], 9)), rollout, 64)
    question = Question("q", Prompt(0, np.array([5], np.int32), "a"), {})

    async def ask() -> Reply:
        reply = asyncio.create_task(source.reply(question, None, Sampling(8, stop=("c",)), 0))
        await asyncio.sleep(0)
        ((request, future),) = source._wanted
        ids = np.array([WORDS.index(word) for word in "bcd"], np.int32)
        future.set_result(Sample.single_turn(request, ids, np.zeros(3, np.float32), 0, "stop"))
        return await reply

    assert asyncio.run(ask()) == Reply("b c", 3, False)

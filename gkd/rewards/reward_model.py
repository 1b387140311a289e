"""The reward ``reward_model``: a sequence classification model, in a group of its own.

It answers over ZeroMQ like the teacher (:class:`gkd.inference.requests.Rate`), so requests have deadlines and go to
another replica when one does not answer.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar

from gkd.config.base import GroupName
from gkd.rewards.completion import RewardFunction

if TYPE_CHECKING:
    from gkd.types import Int32, Prompt


class ModelReward(RewardFunction):
    """Is given by the workers of the group ``reward_model``; its settings are that group's."""

    group: ClassVar[GroupName | None] = "reward_model"


def tokens_of(prompt: Prompt, response_ids: Int32, response: str, tokenizer: Any, same_tokenizer: bool) -> Int32:
    """Return what the reward model reads: the student's tokens where it has its tokenizer, else the text anew.

    The text goes through the model's chat template if it has one, the prompt as the user's message where the data gave
    no messages.
    """
    import numpy as np

    if same_tokenizer:
        return np.concatenate([prompt.token_ids, response_ids])
    if tokenizer.chat_template is None:
        ids = tokenizer(prompt.text + response)["input_ids"]
    else:
        messages = [*(prompt.messages or [{"role": "user", "content": prompt.text}])]
        messages.append({"role": "assistant", "content": response})
        ids = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=True)["input_ids"]
    return np.asarray(ids, dtype=np.int32)

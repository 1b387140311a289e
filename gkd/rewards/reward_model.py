"""The reward ``reward_model``: what is put before the model that gives it.

It is asked like the teacher, over ZeroMQ (:class:`gkd.inference.requests.Rate`), so requests have deadlines and go to
another replica when one does not answer.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gkd.types import Int32, Prompt


def tokens_of(prompt: Prompt, response_ids: Int32, response: str, tokenizer: Any, same_tokenizer: bool) -> Int32:
    """What is put before the reward model: the very tokens where it has the student's tokenizer, else the text anew.

    The text goes through the model's chat template if it has one, the prompt as the user's message where the data gave
    no messages.
    """
    if same_tokenizer:
        return np.concatenate([prompt.token_ids, response_ids])
    if tokenizer.chat_template is None:
        ids = tokenizer(prompt.text + response)["input_ids"]
    else:
        asked = list(prompt.messages or [{"role": "user", "content": prompt.text}])
        said = [*asked, {"role": "assistant", "content": response}]
        ids = tokenizer.apply_chat_template(said, tokenize=True, return_dict=True)["input_ids"]
    return np.asarray(ids, dtype=np.int32)

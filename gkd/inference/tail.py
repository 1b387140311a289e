"""What the top K of a teacher leaves out, summed where the whole row of the vocabulary is at hand.

From float32 log-probabilities of the top K alone a tail near 1e-8 cannot be had: 1 minus their sum is rounding. vLLM
gives K entries of a row and each token's rank, and nothing else. Nobody here reads ranks, so the tail takes their place
on its way through vLLM, bit for bit: both are 32 bits wide.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

from gkd.inference.vllm_spans import AT_ONCE_BYTES, score_spans_alone

if TYPE_CHECKING:
    from torch import Tensor


def tail_logprobs(logprobs: Tensor, ids: Tensor) -> Tensor:
    """Return log-probability of all tokens but ``ids`` [N, K] together, of log-probabilities ``logprobs`` [N, V].

    As [N], float32: the sum over the complement, right to a few parts in a million however small it is. -inf where the
    complement is empty or impossible. A few rows at a time.
    """
    import torch

    n_rows = max(1, AT_ONCE_BYTES // (4 * logprobs.shape[-1]))
    parts = zip(torch.split(logprobs, n_rows), torch.split(ids, n_rows), strict=True)
    return torch.cat([rows.float().scatter(-1, top, -torch.inf).logsumexp(-1) for rows, top in parts])


def tails_of(rows: Any) -> Tensor:
    """Return the tails [rows] in vLLM's LogprobsTensors where :func:`tails_instead_of_ranks` was applied."""
    import torch

    tails: Tensor = rows.selected_token_ranks.view(torch.float32)
    return tails


def tails_instead_of_ranks(worker: Any) -> None:
    """Have the scores of prompt tokens carry tails in place of ranks; for ``collective_rpc``.

    There are two model runners in vLLM. One takes scores apart with a method of its sampler; the other, which runs on
    GPUs, has a part for prompts that can be replaced as a whole (:mod:`gkd.inference.vllm_spans`).
    """
    sampler: Any = getattr(worker.model_runner, "sampler", None)
    if hasattr(sampler, "gather_logprobs"):
        sampler.gather_logprobs = _with_tails(sampler.gather_logprobs)
    else:
        score_spans_alone(worker.model_runner)


def _with_tails(take_apart: Any) -> Any:
    """Return ``take_apart(logprobs [N, V], K, token_ids [N])``, which gives LogprobsTensors, with tails."""

    @wraps(take_apart)
    def take(logprobs: Tensor, k: int, token_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        import torch

        rows = take_apart(logprobs, k, token_ids, *args, **kwargs)
        # The first entry of a row is the token itself, whether or not it is among the K after it.
        tails = tail_logprobs(logprobs, rows.logprob_token_ids[:, 1:].long())
        return rows._replace(selected_token_ranks=tails.view(torch.int32))

    return take

"""What the top K of a teacher leaves out, summed where the whole row of the vocabulary is at hand.

From float32 log-probabilities of the top K alone a tail near 1e-8 cannot be had: 1 minus their sum is rounding. vLLM
gives K entries of a row and each token's rank, and nothing else. Nobody here reads ranks, so the tail takes their place
on its way through vLLM, bit for bit: both are 32 bits wide.
"""

from __future__ import annotations

from functools import wraps
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from torch import Tensor


AT_ONCE_BYTES = 64 << 20  # of float32 scores; vLLM has measured what is free without these copies


def tail_logprobs(scores: Tensor, ids: Tensor, normalised: bool = False) -> Tensor:
    """Return log-probability of all tokens but ``ids`` [N, K] together, of logits ``scores`` [N, V].

    ``normalised``: they are log-probabilities already. As [N], float32: the sum over the complement, right to a few
    parts in a million however small it is. -inf where the complement is empty or impossible. A few rows at a time.
    """
    import torch

    n_rows = max(1, AT_ONCE_BYTES // (4 * scores.shape[-1]))
    parts = zip(torch.split(scores, n_rows), torch.split(ids, n_rows), strict=True)
    return torch.cat([_tails(rows, top, normalised) for rows, top in parts])


def _tails(scores: Tensor, ids: Tensor, normalised: bool) -> Tensor:
    import torch

    scores = scores.float()
    rest = torch.logsumexp(scores.scatter(-1, ids, -torch.inf), -1)
    return rest if normalised else rest - torch.logsumexp(scores, -1)


def tails_of(rows: Any) -> Tensor:
    """Return the tails [rows] in vLLM's LogprobsTensors where :func:`tails_instead_of_ranks` was applied."""
    import torch

    tails: Tensor = rows.selected_token_ranks.view(torch.float32)
    return tails


def tails_instead_of_ranks(worker: Any) -> None:
    """Have the scores of prompt tokens carry tails in place of ranks; for ``collective_rpc``.

    There are two model runners in vLLM. One takes scores apart with a method of its sampler, the other, which runs on
    GPUs, with a function that it has imported.
    """
    sampler: Any = getattr(worker.model_runner, "sampler", None)
    if hasattr(sampler, "gather_logprobs"):
        sampler.gather_logprobs = _with_tails(sampler.gather_logprobs, normalised=True)
        return
    from vllm.v1.worker.gpu.sample import prompt_logprob

    if not hasattr(prompt_logprob.compute_topk_scores, "__wrapped__"):  # the function is every engine's
        prompt_logprob.compute_topk_scores = _with_tails(prompt_logprob.compute_topk_scores, normalised=False)


def _with_tails(take_apart: Any, normalised: bool) -> Any:
    """Return ``take_apart(scores [N, V], K, token_ids [N])``, which gives LogprobsTensors, with tails."""

    @wraps(take_apart)
    def take(scores: Tensor, k: int, token_ids: Tensor, *args: Any, **kwargs: Any) -> Any:
        import torch

        rows = take_apart(scores, k, token_ids, *args, **kwargs)
        # The first entry of a row is the token itself, whether or not it is among the K after it.
        tails = tail_logprobs(scores, rows.logprob_token_ids[:, 1:].long(), normalised)
        return rows._replace(selected_token_ranks=tails.view(torch.int32))

    return take

"""Divergences by their textbook definitions: scalar loops over probabilities in float64, to test the losses against.

Nothing here works on logarithms of probabilities, buckets by masks, or sums by vectors. Autograd of these scalars
gives the reference gradients.
"""

import torch


def probabilities(logits, temperature=1.0):
    """Softmax of one position's logits [V], as a list of scalars."""
    weights = [torch.exp(z / temperature) for z in logits.double()]
    return [w / sum(weights) for w in weights]


def kl(a, b):
    return sum((x * torch.log(x / y) for x, y in zip(a, b, strict=True)), torch.zeros((), dtype=torch.float64))


def jsd(p, q, beta):
    m = [beta * x + (1 - beta) * y for x, y in zip(p, q, strict=True)]
    return beta * kl(p, m) + (1 - beta) * kl(q, m)


def divergence(name, p, q, beta):
    """``name`` as in the settings, between teacher ``p`` and student ``q``."""
    if name == "forward_kl" or (name == "jsd" and beta == 0):
        return kl(p, q)
    if name == "reverse_kl" or (name == "jsd" and beta == 1):
        return kl(q, p)
    return jsd(p, q, beta)


def outcomes(probs, ids, tail):
    """The probabilities of ``ids``, and that of all other tokens in one where ``tail`` and there are others."""
    chosen = [int(i) for i in ids]
    kept = [probs[i] for i in chosen]
    others = [x for i, x in enumerate(probs) if i not in chosen]
    return [*kept, sum(others)] if tail and others else kept

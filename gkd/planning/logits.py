"""How many copies of a chunk's logits [c, V] exist at once, read off gkd.losses and gkd.algorithms.

All are float32; the head's own result is there beside them in the type that is computed in.
"""

from __future__ import annotations

from gkd.config import Algorithm

F32 = 4


def needs_policy(algorithm: Algorithm) -> bool:
    """Whether the sampled tokens' own log-probabilities are part of the loss."""
    return algorithm.policy_weight > 0 or algorithm.kl.coef > 0 or algorithm.supervised_weight > 0


def logit_copies(algorithm: Algorithm, vocabulary: int) -> tuple[int, int]:
    """Float32 [c, V] at the worst moment of a chunk's forward pass, the head's own result not among them, and in all
    at that of its backward pass.

    Policy: scaled logits, their log-softmax, its exponential, the entropies: 4; backward the log-softmax and the
    gradients before and after it: 3. Divergence over K tokens: log-softmax, exponential, entropies: 3; backward with a
    tail also the copy without the K tokens and its gradient: 5. Over the whole vocabulary: both log-probabilities, both
    clamped, and the product's three factors: 7; for jsd, two more logarithms of ratios with their operands: 13. In a
    mixed loss what the policy keeps waits through the divergence's backward pass.
    """
    if not algorithm.distils:
        return 4, 3
    loss = algorithm.loss
    if loss.name == "sampled_reverse_kl" or (loss.top_k is not None and loss.top_k < vocabulary and not loss.tail):
        forward, backward = 3, 4
    elif loss.top_k is not None and loss.top_k < vocabulary:
        forward, backward = 3, 5
    else:
        forward, backward = (13, 14) if loss.name == "jsd" else (7, 8)
    return (max(4, forward), backward + 2) if needs_policy(algorithm) else (forward, backward)


def logit_bytes(algorithm: Algorithm, vocabulary: int, chunk: int, c: int) -> tuple[float, float]:
    """Bytes of logits at the worst moments of forward and backward pass.

    A divergence in bfloat16 has the head's result once more, converted to float32.
    """
    forward, backward = logit_copies(algorithm, vocabulary)
    numbers = float(chunk * vocabulary)
    return numbers * ((forward + (c < F32 and algorithm.distils)) * F32 + c), numbers * backward * F32

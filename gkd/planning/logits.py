"""How many copies of a chunk's logits [c, V] exist at once, read off gkd.losses and gkd.algorithms.

All are float32; the head's own result is there beside them in the type that is computed in.
"""

from __future__ import annotations

from gkd.config import Algorithm

F32 = 4


def logit_copies(algorithm: Algorithm, vocabulary: int) -> tuple[int, int]:
    """Float32 [c, V] at the worst moment of a chunk's forward pass, the head's own result not among them, and in all
    at that of its backward pass.

    Policy: scaled logits, their log-softmax, its exponential, the entropies: 4; backward the log-softmax and the
    gradients before and after it: 3. Divergence over K tokens: log-softmax, exponential, entropies: 3; backward with a
    tail also the copy without the K tokens and its gradient: 5. What one over the whole vocabulary has is the
    divergence's own (:attr:`gkd.losses.divergence.Divergence.logit_copies`). In a mixed loss what the policy keeps
    waits through the divergence's backward pass.
    """
    if not algorithm.distils:
        return 4, 3
    loss = algorithm.loss
    if loss.compares_tokens_alone or loss.top_k is None or loss.top_k >= vocabulary:
        forward, backward = loss.selected.logit_copies
    else:
        forward, backward = (3, 5) if loss.tail else (3, 4)
    mixed = algorithm.needs_policy or algorithm.supervised_weight > 0
    return (max(4, forward), backward + 2) if mixed else (forward, backward)


def logit_bytes(algorithm: Algorithm, vocabulary: int, chunk: int, c: int) -> tuple[float, float]:
    """Bytes of logits at the worst moments of forward and backward pass.

    A divergence in bfloat16 has the head's result once more, converted to float32.
    """
    forward, backward = logit_copies(algorithm, vocabulary)
    numbers = float(chunk * vocabulary)
    return numbers * ((forward + (c < F32 and algorithm.distils)) * F32 + c), numbers * backward * F32

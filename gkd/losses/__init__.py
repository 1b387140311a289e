"""Divergences between student and teacher at response positions."""

MIN_LOGPROB = -1000.0
"""Log-probabilities below this, -inf among them, count as this: an outcome that one side rules out costs the other
side 1000 nats for certain instead of infinity, and no NaN reaches a gradient. Its probability is exactly 0 still."""

"""Evaluation: sets of questions, how they are answered, what is kept of it, and what the figures are worth."""

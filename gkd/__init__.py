"""On-policy distillation and reinforcement learning of language models on Ray pools."""

__version__ = "0.2.0"
"""The version of this code, which packaging reads from here and a run writes into its files."""

"""On-policy distillation and reinforcement learning of language models on Ray pools."""

"""The training loop, and what happens in a step of it."""

"""Processes on reserved GPUs, and the groups of them that a run calls."""

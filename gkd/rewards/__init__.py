"""Rewards, one a file, and the processes that they run in."""

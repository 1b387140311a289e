"""What to change: other settings and other splits of the GPUs, tried one after the other, and what a plan prints."""

"""Which worker gets which GPUs: whether a layout fits, and whether workers have what was meant."""

"""The task ``data.task=sort_digits``: small models, made on the spot, that learn to sort digits."""

"""transformers' models over sequences laid end to end: attention, what is below the head, the head."""

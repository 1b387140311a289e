"""transformers' models over sequences laid end to end: attention, states, what is below the head, the head."""

"""The student in training: FSDP2 over its ranks, packing, adapters, its optimizer and state."""

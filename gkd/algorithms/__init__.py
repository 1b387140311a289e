"""From scored samples to training samples: advantages, and what each token counts."""

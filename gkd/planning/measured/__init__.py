"""What a run took, by its timeline and metrics, for the plan of another."""

"""Models and data of a run, found and checked before Ray starts."""

"""Ray's processes: a cluster's or a run's own, how they are reached, and how they and programs end."""

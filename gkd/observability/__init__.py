"""What a run writes and shows: metrics, trackers, samples, progress, warnings, timeline, report."""

"""What a run writes and shows: record, metrics, samples, checkpoints, guards, console, report."""

"""What a run leaves on disk and prints: its folder, log, checkpoints, evaluation and report."""

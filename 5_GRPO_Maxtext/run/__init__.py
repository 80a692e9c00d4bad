"""A run's output: its folder, log, checkpoints, evaluation and report."""

"""Run folders that survive: checkpoints, the lock, the metrics log, and a run opened for use."""

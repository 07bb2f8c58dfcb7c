"""Training: the loss, the optimizer, one update, and the loop that survives being stopped."""

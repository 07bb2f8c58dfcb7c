"""Several processes at one job: the ranks that torchrun starts, what they share, and how they notice a lost one."""

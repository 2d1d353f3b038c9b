"""Trainer ranks: the worker process, its backends, packing, log-probabilities, checkpoints."""

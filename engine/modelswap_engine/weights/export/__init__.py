"""Weights that leave the engine: one tensor to look at, a checkpoint on disk, or all of them to another engine."""

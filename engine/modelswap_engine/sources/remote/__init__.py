"""Checkpoints that lie elsewhere: a folder of files that are read by ranges, at one revision."""

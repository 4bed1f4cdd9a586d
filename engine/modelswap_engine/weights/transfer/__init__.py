"""Weights that arrive from outside a checkpoint folder: received, hashed, and kept until they are staged."""

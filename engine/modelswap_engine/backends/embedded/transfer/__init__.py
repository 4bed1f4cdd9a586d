"""Weights that come in and go out beside swaps: asked by the front, carried out by ranks."""

"""Checkpoints as data: manifest, content digest, diff, fusion groups. No torch, no network."""

"""Decisions: a snapshot of one slot in, one next action out. Pure: no kopf, no HTTP, no clock, no randomness."""

"""The two kinds as typed values, and the names both sides of the API agree on. Does no I/O."""

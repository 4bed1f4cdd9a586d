"""Bytes by their hash in a folder of this pod: what was fetched once is not fetched again, not even after a restart."""

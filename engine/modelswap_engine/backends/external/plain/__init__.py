"""Swaps by an engine's own load from a folder, with nothing of ours in its process: what every such engine needs.

Folders for the way there and back, what is refused before an engine is touched, and checksums that an engine tells,
held against a version. No engine is known by name, and none is asked anything here.
"""

"""The routes of other engines, for trainers and tools that know those: translated into calls of this one.

They are a dialect, not a second door: the same token, the same transaction, the same refusals.
"""

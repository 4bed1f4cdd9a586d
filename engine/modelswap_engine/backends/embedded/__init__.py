"""The default engine: transformers' continuous batching in worker processes, one per rank.

The front half (``backend``, ``process``, ``streams``) is asyncio and imports no torch; the worker half (``worker``,
``rank``, ``generator``, ``loading``, ``sampler``) runs in its own process, so that a crash of the model is not a crash
of the door. ``wire`` is all they share.
"""

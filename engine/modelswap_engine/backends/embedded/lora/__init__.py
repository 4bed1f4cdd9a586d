"""LoRA adapters inside the worker: read, held in memory, placed in slots, applied to their own rows of a batch.

The base keeps its parameters, their names and their memory: adapters are applied by hooks behind its modules, so that
loading, hashing and swapping it go on as if there were none.
"""

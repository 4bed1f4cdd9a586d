"""LoRA adapters on a running base: which there are, who uses them, which are in the engine's slots.

The front's half. It knows no torch and no HTTP: adapters are names, digests, sizes and references here; what their
tensors do is the engine's business, and changing them never waits for, or stops, requests of others.
"""

"""The sidecar's half of engines that are servers of their own, whichever they are: no torch, no model.

What differs between engines is behind :class:`~modelswap_engine.backends.external.control.EngineControl`.
"""

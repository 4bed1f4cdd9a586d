"""The engine side of modelswap: the sidecar, the swap transaction and the weights core."""

__version__ = "0.1.0"

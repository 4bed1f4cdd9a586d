"""The Kubernetes operator of modelswap: decides which pod serves which version, and drives its sidecar.

The layers, from what knows least to what knows most: ``api`` (types), ``planning`` and ``status`` (pure decisions),
``effects`` (the API server and the engines), ``handlers`` (kopf), ``runtime`` (the process).
"""

__version__ = "0.1.0"

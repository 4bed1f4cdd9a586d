"""The Kubernetes operator of modelswap: decides which pod serves which version, and drives its sidecar."""

__version__ = "0.1.0"

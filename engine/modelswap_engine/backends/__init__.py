"""Engines behind one port: the embedded one, and servers of others (vLLM, SGLang) that a sidecar stands before."""

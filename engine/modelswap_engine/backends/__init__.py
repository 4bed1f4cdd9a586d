"""Engines behind one port: the embedded one, and later vLLM and SGLang."""

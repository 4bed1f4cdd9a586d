"""vLLM behind the ports of external engines."""

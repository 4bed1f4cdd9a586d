"""SGLang behind the ports of external engines."""

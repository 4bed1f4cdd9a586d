"""SGLang behind the ports of external engines: its HTTP routes, and swaps through them with nothing of ours in it."""

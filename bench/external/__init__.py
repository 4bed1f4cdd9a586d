"""What modelswap costs before an engine of somebody else: its way in, and swaps by each route into it."""

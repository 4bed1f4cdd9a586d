"""The one summary: what was observed, as a status. Pure, like ``planning``."""

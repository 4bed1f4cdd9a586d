"""A thousand pods that are not there: what one operator costs, and how soon it acts, before a real API server."""

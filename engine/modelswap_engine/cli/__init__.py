"""The command ``modelswap``; modules here are imported only when their command runs."""

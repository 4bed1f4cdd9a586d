"""Where checkpoints come from. Each source resolves a URI to a manifest and local byte ranges."""

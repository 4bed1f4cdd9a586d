"""The only layer that talks: to the API server and to the sidecars of pods."""

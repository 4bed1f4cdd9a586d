"""The half of a swap that runs inside a foreign engine's process: it knows weights, and no engine by name.

It runs with the engine's own Python and torch, so it imports nothing but the weights core, the port's values and the
protocol. ``wire`` is all that the sidecar shares with it.
"""

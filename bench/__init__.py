"""Figures of a swap as ratios measured in one run; nothing here passes or fails by a time."""

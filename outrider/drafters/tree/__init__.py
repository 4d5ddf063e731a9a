"""Drafts that are token trees: static ones, and trees of the most probable nodes."""

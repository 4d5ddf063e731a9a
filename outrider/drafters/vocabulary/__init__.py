"""Draft models whose vocabulary is not the target's."""

"""Drafters that read the target's hidden states: heads trained on a frozen target."""

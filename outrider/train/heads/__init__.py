"""Trains heads on a frozen target, from hidden states that are computed once and kept on disk."""

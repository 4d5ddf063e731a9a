"""Drafts found by beam search, and plain beam search."""

"""Drafts that are chains: a draft model, and what decides how long they get."""

"""Drafts from an n-gram model: a table of counts in place of a draft model."""

"""Drafts copied from earlier tokens: prompt lookup and suffix decoding."""

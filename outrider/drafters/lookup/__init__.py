"""Drafts copied from earlier text: prompt lookup and suffix decoding."""

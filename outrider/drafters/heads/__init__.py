"""Heads: small networks that draft from the target's hidden states."""

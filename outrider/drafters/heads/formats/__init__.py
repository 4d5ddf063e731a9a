"""Checkpoints of heads: the ``speculators`` format, and the layouts that the authors published."""

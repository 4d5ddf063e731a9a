"""The error message for a method without a draft model; separate, so that it imports nothing."""

NEEDS_DRAFT = (
    "method {!r} needs a draft model: pass draft=..., a small model with the target's tokenizer; "
    "or take method='prompt-lookup' or method='suffix', which copy from the text and need none, or "
    "method='plain'"
)
"""A format string that takes the method's name."""

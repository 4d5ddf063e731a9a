"""What is said of a method without what it needs. Imports nothing, so that it costs nothing."""

NEEDS_DRAFT = (
    "method {!r} needs a draft model: pass draft=..., a small model with the target's tokenizer; "
    "or take method='prompt-lookup' or method='suffix', which copy from the text and need none, or "
    "method='plain'"
)
"""Takes the method's name."""

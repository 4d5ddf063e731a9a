"""Error messages for methods without what they draft with. The file imports nothing."""

NEEDS_DRAFT = (
    "method {!r} needs a draft model: pass draft=..., a small model with the target's tokenizer; "
    "or take method='prompt-lookup' or method='suffix', which copy earlier tokens and need none, "
    "or method='plain'"
)
"""A format string that takes the method's name."""

NEEDS_HEAD = (
    "method {!r} drafts with a head that was trained on the target: pass its folder as draft=...; "
    "`outrider train-head` trains one"
)
"""A format string that takes the method's name."""

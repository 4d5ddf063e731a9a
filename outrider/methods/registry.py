"""All named methods by name; the only place where a name is mapped to classes."""

import difflib

from outrider.core.errors import UnknownMethodError
from outrider.core.values import shown
from outrider.methods.block_heads import BLOCK_HEADS
from outrider.methods.chains import CHAINS
from outrider.methods.copying import COPYING
from outrider.methods.heads import HEADS
from outrider.methods.hybrid import HEAD_HYBRIDS, HYBRIDS
from outrider.methods.joint import JOINT
from outrider.methods.medusa import MEDUSA
from outrider.methods.method import Method
from outrider.methods.ngram import NGRAMS
from outrider.methods.self_draft import SELF_DRAFTS
from outrider.methods.trees import TREES
from outrider.methods.vocabularies import VOCABULARIES

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        *CHAINS,
        *TREES,
        *JOINT,
        *NGRAMS,
        *COPYING,
        *VOCABULARIES,
        *SELF_DRAFTS,
        *HYBRIDS,
        *HEADS,
        *HEAD_HYBRIDS,
        *BLOCK_HEADS,
        *MEDUSA,
    )
}


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        UnknownMethodError: no such method; the message suggests a similar name and lists all.
    """
    if not isinstance(name, str):
        raise UnknownMethodError(
            f"method={shown(name)}: must be a name, such as 'speculative' or 'prompt-lookup'"
        )
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name.lower(), METHODS, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownMethodError(f"unknown method {shown(name)}: {hint}known: {', '.join(METHODS)}")

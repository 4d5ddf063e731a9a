"""The named methods: the one place where a command-line string meets a class."""

import difflib

from outrider.core.errors import UnknownMethodError
from outrider.core.values import shown
from outrider.methods.chains import CHAINS
from outrider.methods.copying import COPYING
from outrider.methods.hybrid import HYBRIDS
from outrider.methods.joint import JOINT
from outrider.methods.method import Method, Parts, Recipe
from outrider.methods.ngram import NGRAMS
from outrider.methods.self_draft import SELF_DRAFTS
from outrider.methods.trees import TREES
from outrider.methods.vocabularies import VOCABULARIES

__all__ = ["METHODS", "Method", "Parts", "Recipe", "find_method"]

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
    )
}


def find_method(name: str) -> Method:
    """The method of that name.

    Raises:
        UnknownMethodError: naming the nearest one.
    """
    if not isinstance(name, str):
        raise UnknownMethodError(
            f"method={shown(name)}: must be a name, such as 'speculative' or 'prompt-lookup'"
        )
    if name in METHODS:
        return METHODS[name]
    near = difflib.get_close_matches(name, METHODS, n=1, cutoff=0.3)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise UnknownMethodError(f"unknown method {shown(name)}: {hint}known: {', '.join(METHODS)}")

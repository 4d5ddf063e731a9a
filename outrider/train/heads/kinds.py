"""All kinds of heads that can be trained, by name."""

from __future__ import annotations

from outrider.core.errors import InvalidParameterError
from outrider.core.values import shown
from outrider.train.heads.block_kinds import DFLASH, DSPARK
from outrider.train.heads.eagle3 import EAGLE3
from outrider.train.heads.kind import HeadKind
from outrider.train.heads.medusa import MEDUSA
from outrider.train.heads.peagle import PEAGLE

HEAD_KINDS: dict[str, HeadKind] = {
    kind.name: kind for kind in (EAGLE3, DFLASH, DSPARK, PEAGLE, MEDUSA)
}


def find_kind(name: str) -> HeadKind:
    """The kind of that name.

    Raises:
        InvalidParameterError: no such kind; the message lists all.
    """
    if name not in HEAD_KINDS:
        raise InvalidParameterError(f"kind={shown(name)}: must be one of {', '.join(HEAD_KINDS)}")
    return HEAD_KINDS[name]

"""All kinds of heads: how a folder is recognised and read, and the method that runs it.

A new kind of head is one row here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.core.errors import ModelLoadError
from outrider.drafters.heads.formats.block import is_dflash, is_dspark, load_block
from outrider.drafters.heads.formats.eagle3 import is_eagle3, is_peagle, load_eagle3
from outrider.drafters.heads.formats.folder import read_config
from outrider.drafters.heads.formats.medusa import is_medusa, load_medusa
from outrider.drafters.heads.head import Head
from outrider.runtime import HFModel


@dataclass(frozen=True)
class HeadFormat:
    """A kind of head on disk.

    Attributes:
        kind: its name.
        method: the method that a folder of this kind runs by, where the user names none.
        recognises: whether a ``config.json`` is of this kind.
        load: reads a folder for a target.
    """

    kind: str
    method: str
    recognises: Callable[[Mapping[str, Any]], bool]
    load: Callable[[str | Path, HFModel], Head]


FORMATS = (
    HeadFormat("eagle3", "eagle3", is_eagle3, load_eagle3),
    HeadFormat("dflash", "dflash", is_dflash, load_block),
    HeadFormat("dspark", "dspark", is_dspark, load_block),
    HeadFormat("peagle", "peagle", is_peagle, load_eagle3),
    HeadFormat("medusa", "medusa", is_medusa, load_medusa),
)


def format_of(source: object) -> HeadFormat | None:
    """The kind of the head that a folder holds; None for anything else.

    Raises:
        ModelLoadError: a folder whose ``config.json`` cannot be read, or names a kind of head that
            is not known here.
    """
    if not isinstance(source, str | Path):
        return None
    config = read_config(source)
    if config is None:
        return None
    found = next((each for each in FORMATS if each.recognises(config)), None)
    kind = config.get("speculators_model_type")
    if found is None and kind is not None:
        known = ", ".join(each.kind for each in FORMATS)
        raise ModelLoadError(
            f"{source} holds a head of kind {kind!r}, which is not supported: take one of {known}"
        )
    return found

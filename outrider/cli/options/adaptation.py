"""Options that adapt the draft model or head while it is used."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options.speculation import SPECULATION

Adapt = Annotated[
    bool,
    typer.Option(
        "--adapt",
        help="Adapt the draft model or EAGLE-3 head to the output, which stays as it is, and keep "
        "the weights for the next time. Token ids are not kept.",
        rich_help_panel=SPECULATION,
    ),
]
AdaptFolder = Annotated[
    Path | None,
    typer.Option(
        metavar="DIR",
        help="Where --adapt keeps the weights; implies it. Default: a folder of the cache, for "
        "each pair of models' weights.",
        rich_help_panel=SPECULATION,
    ),
]


@dataclass(frozen=True)
class Adapting:
    """Whether and where the draft model or head is adapted."""

    adapt: Adapt = False
    adapt_folder: AdaptFolder = None

    @property
    def wanted(self) -> bool:
        """Whether it is adapted."""
        return self.adapt or self.adapt_folder is not None

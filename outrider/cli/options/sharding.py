"""Options of targets that are sharded among processes."""

from dataclasses import dataclass
from typing import Annotated

import typer

SHARDING = "Several processes (torchrun)"
REPLICATED = "replicated"


def _complete_placements() -> list[str]:
    return [REPLICATED, "rank0"]


TensorParallel = Annotated[
    int | None,
    typer.Option(
        metavar="N",
        help="Split the target among N processes, which torchrun has to start. Default: among all "
        "that it started.",
        rich_help_panel=SHARDING,
    ),
]
DraftPlacement = Annotated[
    str,
    typer.Option(
        metavar="WHERE",
        help="replicated: every process runs the draft model. rank0: one process does, and sends "
        "its logits to the others.",
        autocompletion=_complete_placements,
        rich_help_panel=SHARDING,
    ),
]
RankTimeout = Annotated[
    float,
    typer.Option(
        metavar="SECONDS",
        min=5,
        help="How long a process waits for another within a round before the run ends with an "
        "error.",
        rich_help_panel=SHARDING,
    ),
]


@dataclass(frozen=True)
class Sharding:
    """How a target is split among processes."""

    tensor_parallel: TensorParallel = None
    draft_placement: DraftPlacement = REPLICATED
    rank_timeout: RankTimeout = 20.0

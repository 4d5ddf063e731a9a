"""Options with the values that formulas take."""

from dataclasses import dataclass
from typing import Annotated

import typer

_VALUES = "Values"


@dataclass(frozen=True)
class Values:
    """What the formulas of speculative decoding take."""

    alpha: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="α, the probability that a drafted token is accepted.",
            rich_help_panel=_VALUES,
        ),
    ] = None
    acceptance_rate: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Accepted over drafted tokens; α is computed from it and --gamma.",
            rich_help_panel=_VALUES,
        ),
    ] = None
    acceptance_length: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="Tokens per round, bonus included; α is computed from it and --gamma.",
            rich_help_panel=_VALUES,
        ),
    ] = None
    gamma: Annotated[
        int | None,
        typer.Option(metavar="N", help="γ, drafted tokens per round.", rich_help_panel=_VALUES),
    ] = None
    cost: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="c, the time of a draft pass over that of a target pass.",
            rich_help_panel=_VALUES,
        ),
    ] = 0.0
    beta: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="β, the time of the verifying pass over that of a target pass over one token.",
            rich_help_panel=_VALUES,
        ),
    ] = 1.0
    operations: Annotated[
        float | None,
        typer.Option(
            metavar="X",
            help="ĉ, arithmetic operations of a draft pass over those of a target pass.",
            rich_help_panel=_VALUES,
        ),
    ] = None
    tokens: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Length of the generations whose variance is computed.",
            rich_help_panel=_VALUES,
        ),
    ] = 128

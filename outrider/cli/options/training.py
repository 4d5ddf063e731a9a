"""Options of every training run."""

from typing import Annotated

import typer

from outrider.cli.errors import fail

RUN, MEASURE = "The run", "Measured acceptance"

LearningRate = Annotated[
    float,
    typer.Option(
        "--learning-rate", "--lr", metavar="X", help="Peak learning rate.", rich_help_panel=RUN
    ),
]
Warmup = Annotated[
    int, typer.Option(metavar="N", min=0, help="Warm-up steps.", rich_help_panel=RUN)
]
TrainingSeed = Annotated[
    int,
    typer.Option(
        metavar="N", help="Seed of the initial weights and the batches.", rich_help_panel=RUN
    ),
]
Resume = Annotated[
    bool,
    typer.Option(
        "--resume/--fresh",
        help="Continue from the checkpoint in the folder, or start over.",
        rich_help_panel=RUN,
    ),
]
CheckpointEvery = Annotated[
    int,
    typer.Option(metavar="N", min=1, help="Steps between checkpoints.", rich_help_panel=RUN),
]
Tensorboard = Annotated[
    bool, typer.Option(help="Write curves for TensorBoard to OUT.", rich_help_panel=RUN)
]
MeasureTemperature = Annotated[
    list[float] | None,
    typer.Option(
        metavar="T",
        help="Temperature to measure at; may be repeated. Default: 0 and 1.",
        rich_help_panel=MEASURE,
    ),
]
BOTH_TEMPERATURES = (0.0, 1.0)
"""What acceptance is measured at by default."""


def check_choice(option: str, value: str, choices: tuple[str, ...]) -> None:
    """Ends the command unless the value of an option is one of its choices."""
    if value not in choices:
        raise fail(f"{option} {value}: must be {' or '.join(choices)}")

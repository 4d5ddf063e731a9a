"""Options of every training run."""

from typing import Annotated

import typer

RUN = "The run"

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

"""``outrider train-head``: trains a head on a frozen target, on the target's own answers."""

from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.errors import INTERRUPTED, fail, say
from outrider.cli.options.models import Device
from outrider.cli.options.speculation import Speculation
from outrider.cli.options.training import (
    BOTH_TEMPERATURES,
    MEASURE,
    RUN,
    CheckpointEvery,
    LearningRate,
    MeasureTemperature,
    Resume,
    TrainingSeed,
    Warmup,
    check_choice,
)
from outrider.cli.start import start

_DATA, _RUN, _MEASURE = "Data", RUN, MEASURE


def train_head(
    out: Annotated[
        Path,
        typer.Option(metavar="DIR", help="Folder of the run; the best head ends up in DIR/best."),
    ],
    target: Annotated[
        str,
        typer.Option(metavar="MODEL", help="The target: a folder, a GGUF file or a hub id."),
    ],
    data: Annotated[
        Path,
        typer.Option(
            metavar="FILE",
            help='Conversations with the target\'s own answers, one {"messages": [...]} per line.',
        ),
    ],
    kind: Annotated[
        str, typer.Option(metavar="KIND", help="The kind of head, such as eagle3.")
    ] = "eagle3",
    option: Annotated[
        list[str] | None,
        typer.Option(
            "--option",
            "-o",
            metavar="NAME=VALUE",
            help="An option of the kind, such as draft_vocab_size=8192 or ttt_length=7; a wrong "
            "name lists them all. May be repeated.",
        ),
    ] = None,
    length: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=4,
            help="Cut conversations to N tokens.",
            rich_help_panel=_DATA,
        ),
    ] = 1024,
    cache: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep the target's hidden states here, for other runs on the same data. Default: "
            "with the run.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    target_dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="Number format of the target: auto, bfloat16, float16 or float32.",
            rich_help_panel=_DATA,
        ),
    ] = "auto",
    target_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What the head's config.json calls the target, such as its hub id. Default: "
            "--target.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    steps: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Training steps in all.", rich_help_panel=_RUN),
    ] = 2000,
    batch: Annotated[
        int,
        typer.Option(metavar="N", min=1, help="Conversations per step.", rich_help_panel=_RUN),
    ] = 8,
    learning_rate: LearningRate = 5e-4,
    optimizer: Annotated[
        str,
        typer.Option(
            metavar="NAME",
            help="adamw; or muon for the layers' matrices, which learns more per step at a "
            "learning rate of 0.003.",
            rich_help_panel=_RUN,
        ),
    ] = "adamw",
    warmup: Warmup = 50,
    decay: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            help="Final steps, over which the learning rate falls to zero. Default: half of all "
            "steps; with a cosine, all after the warm-up.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    decay_shape: Annotated[
        str,
        typer.Option(
            metavar="SHAPE",
            help="How the learning rate falls: linear, or cosine.",
            rich_help_panel=_RUN,
        ),
    ] = "linear",
    dtype: Annotated[
        str,
        typer.Option(
            metavar="DTYPE",
            help="float32, which resumes bit for bit, or bfloat16 for the products; weights are "
            "always float32.",
            rich_help_panel=_RUN,
        ),
    ] = "float32",
    device: Device = "auto",
    seed: TrainingSeed = 0,
    resume: Resume = True,
    checkpoint_every: CheckpointEvery = 100,
    tensorboard: Annotated[
        bool,
        typer.Option(help="Write curves for TensorBoard to DIR.", rich_help_panel=_RUN),
    ] = False,
    evaluate_every: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Steps between measurements of acceptance, which choose the best head.",
            rich_help_panel=_MEASURE,
        ),
    ] = 500,
    held_out: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Keep N conversations out of training; their prompts are continued to measure.",
            rich_help_panel=_MEASURE,
        ),
    ] = 16,
    measure_tokens: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Tokens of each continuation.", rich_help_panel=_MEASURE
        ),
    ] = 64,
    measure_temperature: MeasureTemperature = None,
) -> None:
    """Train a head that drafts from the hidden states of a frozen target.

    The hidden states are computed once and kept on disk. Ctrl-C stops a run at any time; the same
    command continues it.

      outrider train-head --target DIR --data answers.jsonl --out runs/head

    Use it:

      outrider generate --target DIR --draft runs/head/best --chat "Hello!"
    """
    check_choice("--dtype", dtype, ("bfloat16", "float32"))
    check_choice("--decay-shape", decay_shape, ("linear", "cosine"))
    check_choice("--optimizer", optimizer, ("adamw", "muon"))
    options = Speculation(option=option).options
    start("outrider.train.heads.run")
    import torch

    from outrider.train.heads.kinds import find_kind
    from outrider.train.heads.run import HeadRun, run_head
    from outrider.train.loop import Interrupted
    from outrider.train.optim import Schedule

    whole = steps - min(warmup, steps) if decay_shape == "cosine" else steps // 2
    falling = whole if decay is None else decay
    try:
        run_head(
            out,
            HeadRun(
                find_kind(kind),
                target,
                data,
                options,
                length,
                held_out,
                measure_tokens,
                tuple(measure_temperature or BOTH_TEMPERATURES),
                cache,
                None if target_dtype == "auto" else target_dtype,
                device,
                target_name,
            ),
            Schedule(
                learning_rate,
                steps,
                min(warmup, steps - falling),
                falling,
                "cosine" if decay_shape == "cosine" else "linear",
            ),
            batch_size=batch,
            seed=seed,
            fresh=not resume,
            dtype=getattr(torch, dtype),
            optimizer="muon" if optimizer == "muon" else "adamw",
            checkpoint_every=checkpoint_every,
            evaluate_every=evaluate_every,
            tensorboard=tensorboard,
        )
    except Interrupted as stop:
        say(f"stopped after step {stop}; run the same command again to continue")
        raise typer.Exit(INTERRUPTED) from None
    except (ValueError, OSError) as error:
        raise fail(str(error).splitlines()[0]) from error

"""``outrider train``: trains a language model, or a draft model, on Python packages or text files.

This module holds the options and their checks; it imports torch only when a run starts. Bad input
is reported on one line on stderr with exit code 2.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options.training import (
    RUN,
    CheckpointEvery,
    LearningRate,
    Resume,
    Tensorboard,
    TrainingSeed,
    Warmup,
)
from outrider.cli.start import start


class Dtype(StrEnum):
    """Precision of the matrix products; the weights are always float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"


_DATA, _SHAPE, _RUN = "Data", "Shape of the model", RUN


def train(
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR", help="Folder of the run: corpus, checkpoints and, at the end, model/."
        ),
    ],
    package: Annotated[
        list[str] | None,
        typer.Option(
            metavar="PACKAGE",
            help="Train on the source code of this installed package (python-stdlib: the standard "
            "library). May be repeated. Packages without a permissive licence are refused.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    text: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="PATH",
            help="Train on this text file, or on the *.py and *.txt files of this folder. "
            "May be repeated.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    pairs: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Train an encoder-decoder (T5) on this file of pairs: one JSON object with source "
            "and text per line. Ignores --kv-heads and --context; --layers applies to the encoder "
            "and to the decoder.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    max_package_mb: Annotated[
        float,
        typer.Option(
            metavar="MB",
            help="Take at most this many megabytes of a package.",
            rich_help_panel=_DATA,
        ),
    ] = 4.0,
    tokenizer: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of the tokenizer. Default: the teacher's; without a teacher one is "
            "trained.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    vocab_size: Annotated[
        int,
        typer.Option(
            metavar="N", help="Vocabulary size of the trained tokenizer.", rich_help_panel=_DATA
        ),
    ] = 6144,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.", rich_help_panel=_SHAPE)] = 16,
    hidden: Annotated[
        int, typer.Option(metavar="N", help="Hidden size.", rich_help_panel=_SHAPE)
    ] = 256,
    ffn: Annotated[
        int,
        typer.Option(metavar="N", help="Feed-forward size.", rich_help_panel=_SHAPE),
    ] = 640,
    heads: Annotated[
        int, typer.Option(metavar="N", help="Attention heads.", rich_help_panel=_SHAPE)
    ] = 4,
    kv_heads: Annotated[
        int,
        typer.Option(
            metavar="N", help="Key-value heads; must divide --heads.", rich_help_panel=_SHAPE
        ),
    ] = 2,
    context: Annotated[
        int,
        typer.Option(metavar="N", help="Context length in tokens.", rich_help_panel=_SHAPE),
    ] = 1024,
    teacher: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of a trained target: train a draft model for it, by distillation (forward "
            "KL), starting from its embeddings.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of a Llama model to start from; its shape overrides the options above.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Training steps in all.", rich_help_panel=_RUN)
    ] = 2000,
    batch: Annotated[
        int, typer.Option(metavar="N", help="Sequences per step.", rich_help_panel=_RUN)
    ] = 16,
    length: Annotated[
        int, typer.Option(metavar="N", help="Tokens per sequence.", rich_help_panel=_RUN)
    ] = 256,
    learning_rate: LearningRate = 4e-3,
    warmup: Warmup = 60,
    decay: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Final steps, over which the learning rate decays to zero. Default: a quarter of "
            "all steps.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    seed: TrainingSeed = 0,
    resume: Resume = True,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the training step with torch.compile: takes a minute, then trains twice "
            "as fast.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="float32, which resumes bit for bit, or bfloat16, which is faster on many "
            "processors.",
            rich_help_panel=_RUN,
        ),
    ] = Dtype.float32,
    checkpoint_every: CheckpointEvery = 100,
    tensorboard: Tensorboard = True,
) -> None:
    """Train a language model on source code or text, an encoder-decoder on pairs of texts, or a
    draft model for either.

    Ctrl-C stops a run at any time; the same command continues it.

    A target, then a draft model for it:

      outrider train --out runs/target --package python-stdlib --compile

      outrider train --out runs/draft --package python-stdlib --layers 1 \\
        --teacher runs/target/model
    """
    counts = {
        "--steps": steps,
        "--batch": batch,
        "--length": length,
        "--layers": layers,
        "--hidden": hidden,
        "--ffn": ffn,
        "--heads": heads,
        "--kv-heads": kv_heads,
        "--context": context,
        "--checkpoint-every": checkpoint_every,
    }
    for name, value in counts.items():
        if value < 1:
            _fail(f"{name} is {value}; it must be at least 1")
    if not package and not text and not pairs:
        _fail(
            "nothing to train on; pass a --package (such as python-stdlib), a --text file, or a "
            "file of --pairs"
        )
    if pairs is not None and (package or text or init_from or tokenizer or compile_):
        _fail(
            "--pairs cannot be combined with --package, --text, --init-from, --tokenizer or "
            "--compile"
        )
    if pairs is None and length > context:
        _fail(f"--length {length} is more than --context {context}; lower it or raise the context")
    for name, folder in (
        ("--teacher", teacher),
        ("--init-from", init_from),
        ("--tokenizer", tokenizer),
    ):
        if folder is not None and not folder.is_dir():
            _fail(f"{name}: no such folder: {folder}")

    start("outrider.train.run")
    from outrider.train.loop import Interrupted
    from outrider.train.models import Architecture
    from outrider.train.optim import Schedule
    from outrider.train.run import Corpus, Start, run
    from outrider.train.run_pairs import PairRun, run_pairs
    from outrider.train.seq2seq import T5Shape

    try:
        schedule = Schedule(
            learning_rate,
            steps,
            min(warmup, steps // 4),
            steps // 4 if decay is None else decay,
        )
        if pairs is not None:
            shape = T5Shape(vocab_size, hidden, ffn, layers, layers, heads)
            run_pairs(
                out,
                PairRun(pairs, shape, teacher, length),
                schedule,
                batch_size=batch,
                seed=seed,
                fresh=not resume,
                dtype=dtype.value,
                checkpoint_every=checkpoint_every,
                tensorboard=tensorboard,
            )
            return
        run(
            out,
            Corpus(tuple(package or ()), tuple(text or ()), int(max_package_mb * 1e6)),
            Start(
                Architecture(vocab_size, hidden, ffn, layers, heads, kv_heads, context),
                tokenizer=tokenizer,
                teacher=teacher,
                weights=init_from,
            ),
            schedule,
            batch_size=batch,
            length=length,
            seed=seed,
            fresh=not resume,
            dtype=dtype.value,
            compile=compile_,
            checkpoint_every=checkpoint_every,
            tensorboard=tensorboard,
        )
    except Interrupted as stop:
        typer.echo(f"stopped after step {stop}; run the same command again to continue", err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError) as error:
        _fail(str(error).splitlines()[0])


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)

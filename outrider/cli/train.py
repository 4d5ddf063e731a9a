"""`outrider train`: train a language model, or a draft for one, on Python packages or text files.

Only options and their checks are here; heavy imports wait until a run really starts, so that
`--help` is quick.  Bad input ends in one line on stderr and exit code 2.
"""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.start import start


class Dtype(StrEnum):
    """Number format of the matrix products; weights are always kept in float32."""

    float32 = "float32"
    bfloat16 = "bfloat16"


_DATA, _SHAPE, _RUN = "Data", "Shape of the model", "The run"


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
            help="Train on this installed package's source (python-stdlib: the standard library). "
            "May be repeated. Packages without a permissive licence are refused.",
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
            help="Train an encoder-decoder (a T5) on this file of pairs: a JSON object with source "
            "and text per line. Needs no --kv-heads and no --context; --layers counts for encoder "
            "and decoder alike.",
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
            help="Folder of a tokenizer to use. Default: the teacher's, else one is trained.",
            rich_help_panel=_DATA,
        ),
    ] = None,
    vocab_size: Annotated[
        int,
        typer.Option(metavar="N", help="Entries of the tokenizer to train.", rich_help_panel=_DATA),
    ] = 6144,
    layers: Annotated[int, typer.Option(metavar="N", help="Layers.", rich_help_panel=_SHAPE)] = 16,
    hidden: Annotated[
        int, typer.Option(metavar="N", help="Width of the hidden state.", rich_help_panel=_SHAPE)
    ] = 256,
    ffn: Annotated[
        int,
        typer.Option(
            metavar="N", help="Width inside the feed-forward blocks.", rich_help_panel=_SHAPE
        ),
    ] = 640,
    heads: Annotated[
        int, typer.Option(metavar="N", help="Attention heads.", rich_help_panel=_SHAPE)
    ] = 4,
    kv_heads: Annotated[
        int,
        typer.Option(
            metavar="N", help="Key-value heads; divides the heads.", rich_help_panel=_SHAPE
        ),
    ] = 2,
    context: Annotated[
        int,
        typer.Option(
            metavar="N", help="Longest text, in tokens, it can read.", rich_help_panel=_SHAPE
        ),
    ] = 1024,
    teacher: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of a trained target: the new model becomes its draft, trained to imitate "
            "its distribution (forward KL), and starts from its embeddings.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    init_from: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder of a Llama to start from; its shape replaces the options above.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    steps: Annotated[
        int, typer.Option(metavar="N", help="Updates of the weights, in all.", rich_help_panel=_RUN)
    ] = 2000,
    batch: Annotated[
        int, typer.Option(metavar="N", help="Rows in a step.", rich_help_panel=_RUN)
    ] = 16,
    length: Annotated[
        int, typer.Option(metavar="N", help="Tokens in a row.", rich_help_panel=_RUN)
    ] = 256,
    learning_rate: Annotated[
        float,
        typer.Option(
            "--learning-rate", "--lr", metavar="X", help="Peak rate.", rich_help_panel=_RUN
        ),
    ] = 4e-3,
    warmup: Annotated[
        int, typer.Option(metavar="N", help="Steps until the peak rate.", rich_help_panel=_RUN)
    ] = 60,
    decay: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            help="Last steps, over which the rate falls to zero. Default: a quarter.",
            rich_help_panel=_RUN,
        ),
    ] = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N", help="Fixes the first weights and the batches.", rich_help_panel=_RUN
        ),
    ] = 0,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume/--fresh",
            help="Go on from the checkpoint in the folder, or start over.",
            rich_help_panel=_RUN,
        ),
    ] = True,
    compile_: Annotated[
        bool,
        typer.Option(
            "--compile/--no-compile",
            help="Compile the step with torch.compile: a minute's wait, then twice the speed.",
            rich_help_panel=_RUN,
        ),
    ] = False,
    dtype: Annotated[
        Dtype,
        typer.Option(
            metavar="DTYPE",
            help="float32, which resumes bit for bit; or bfloat16, faster on many processors.",
            rich_help_panel=_RUN,
        ),
    ] = Dtype.float32,
    checkpoint_every: Annotated[
        int, typer.Option(metavar="N", help="Steps between checkpoints.", rich_help_panel=_RUN)
    ] = 100,
    tensorboard: Annotated[
        bool, typer.Option(help="Write curves for TensorBoard to OUT.", rich_help_panel=_RUN)
    ] = True,
) -> None:
    """Train a language model on source code or text, an encoder-decoder on pairs of texts, or a
    draft model that imitates either.

    Stop with Ctrl-C whenever you like: the same command goes on where it stopped.

    A target, then its draft:

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
            _fail(f"{name} is {value}; it must be 1 or more")
    if not package and not text and not pairs:
        _fail(
            "nothing to train on; name a --package (such as python-stdlib), a --text file, or a "
            "file of --pairs"
        )
    if pairs is not None and (package or text or init_from or tokenizer or compile_):
        _fail(
            "--pairs goes without --package, --text, --init-from, --tokenizer and --compile; leave "
            "them out"
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
        typer.echo(f"stopped after step {stop}; run the same command again to go on", err=True)
        raise typer.Exit(130) from None
    except (ValueError, OSError) as error:
        _fail(str(error).splitlines()[0])


def _fail(message: str) -> None:
    typer.echo(f"error: {message}", err=True)
    raise typer.Exit(2)

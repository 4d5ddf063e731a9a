"""``outrider profile``: where the time of a round goes, and the least time it could take."""

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.engines import open_engine, require_draft_of
from outrider.cli.errors import fail
from outrider.cli.options.models import EMBEDDED, MaxMemory, Models
from outrider.cli.options.output import OUTPUT, AsJson, PromptArgument, PromptFile
from outrider.cli.options.sampling import Seed, Truncation
from outrider.cli.options.speculation import Speculation
from outrider.cli.progress import Progress
from outrider.cli.prompt import read_prompt
from outrider.cli.start import start

PROMPT = "import argparse\n\n\ndef read_lines(path):\n    "
_MEASUREMENT = "Measurement"
_PICTURES = (".svg", ".png")


def profile(
    prompt: PromptArgument = None,
    file: PromptFile = None,
    *,
    models: Models,
    max_memory: MaxMemory = None,
    speculation: Speculation,
    truncation: Truncation,
    seed: Seed = 0,
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Rounds to time, and rounds to record, in each repeat; fewer if the context fills "
            "up first.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 48,
    repeats: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Repeats; each runs the method, plain decoding, and the method with recording.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 3,
    trace: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Write the rounds recorded in the last repeat as a Chrome trace, for "
            "ui.perfetto.dev or chrome://tracing.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    plot: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Plot the time of a forward pass against its number of tokens (the β curve) to "
            "this .svg or .png.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show where the time of a round goes, and how close it is to the limits of this machine.

    Records a few rounds (draft, target, verify, cache, Python). Measures the memory bandwidth, and
    compares each model's forward pass with the time that reading its weights takes. Times forward
    passes over 1 to 32 tokens, and compares the speed-up over plain decoding with the formula.
    Takes half a minute on the embedded pair:

      outrider profile --trace trace.json --plot beta.svg

    A pair and a prompt of your own:

      outrider profile -f prompt.txt --target big/ --draft small/ --temperature 0

    Profiles batch size 1 and ignores end-of-sequence tokens. Run nothing else meanwhile.
    """
    text = PROMPT if prompt is None and file is None else read_prompt(prompt, file)
    _check_files(trace, plot)
    require_draft_of(speculation.method, models)
    start(compiles=models.compiles)
    from outrider.lab import plots
    from outrider.lab import profile as lab
    from outrider.lab.metadata import run_metadata
    from outrider.sampling import Sampling

    if plot is not None:
        plots.require_matplotlib()
    sampling = Sampling(**vars(truncation), seed=seed)
    engine = open_engine(models, speculation.with_fixed_length, max_memory=max_memory)
    with Progress(as_json) as progress:
        found = lab.profile(
            engine, text, sampling, rounds=rounds, repeats=repeats, progress=progress.show
        )
    where = run_metadata(
        **vars(models)
        | {
            "draft": None if engine.draft is None else models.draft or EMBEDDED,
            "method": engine.method.name,
            "dtype": str(engine.target.dtype).removeprefix("torch."),
            "device": str(engine.target.device),
        },
    )
    document = {"about": where, **found.document}
    try:
        if trace is not None:
            lab.write_trace(found.spans, found.names, trace)
        if plot is not None:
            lab.draw(document, plot)
    except OSError as error:
        raise fail(f"cannot write '{error.filename}': {error.strerror or error}") from error
    if as_json:
        typer.echo(json.dumps(document, ensure_ascii=False))
    else:
        from outrider.cli.profile_table import show

        show(document)
    for written in (trace, plot):
        if written is not None:
            typer.echo(f"wrote {written}", err=True)


def _check_files(trace: Path | None, plot: Path | None) -> None:
    """Fails, before any measurement, if an output file could not be written."""
    if plot is not None and plot.suffix not in _PICTURES:
        raise fail(f"--plot {plot}: must end in {' or '.join(_PICTURES)}")
    if trace is not None and plot is not None and trace.absolute() == plot.absolute():
        raise fail(f"--trace and --plot: both would write {trace}; give each a file of its own")
    for flag, path in (("--trace", trace), ("--plot", plot)):
        if path is None:
            continue
        if path.is_dir():
            raise fail(f"{flag} {path}: is a folder; pass the name of a file")
        if not path.absolute().parent.is_dir():
            raise fail(f"{flag} {path}: there is no folder {path.parent}")
        if not os.access(path if path.exists() else path.absolute().parent, os.W_OK):
            raise fail(f"{flag} {path}: no permission to write there")

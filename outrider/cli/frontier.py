"""``outrider frontier``: what lossy rules gain on a pair, and what they give up."""

import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from outrider.cli.engines import open_engine, require_decoder_only, require_draft
from outrider.cli.errors import FAILED, fail
from outrider.cli.options.models import EMBEDDED, Models
from outrider.cli.options.output import OUTPUT, AsJson
from outrider.cli.options.sampling import MaxNewTokens, Penalties, Seed, Truncation
from outrider.cli.options.speculation import NumSpeculativeTokens, Speculation
from outrider.cli.progress import Progress
from outrider.cli.prompt import read_prompts
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.engine import Engine

PROMPTS = (
    "def fibonacci(n):\n    ",
    "class Stack:\n    def __init__(self",
    "import argparse\n\n\ndef main():\n",
    "try:\n    import numpy as np\nexcept ImportError:\n    ",
)
_MEASUREMENT = "Measurement"


def frontier(
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Prompts: one per line, or JSON lines with a 'prompt' if FILE ends in .jsonl. "
            "The embedded pair has a few of its own.",
        ),
    ] = None,
    *,
    models: Models,
    num_speculative_tokens: NumSpeculativeTokens = None,
    truncation: Truncation,
    penalties: Penalties,
    seed: Seed = 0,
    max_new_tokens: MaxNewTokens = 32,
    positions: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Places of the target's own texts at which all rules are compared.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 192,
    repeats: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Times that the speed is measured, settings taking turns.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 3,
    texts: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Texts per prompt and setting, beside the timed ones, for the perplexity.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 8,
    no_generations: Annotated[
        bool,
        typer.Option(
            "--no-generations",
            help="Compare rules at single positions only; write no texts.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = False,
    out: Annotated[
        Path,
        typer.Option(
            metavar="DIR",
            help="Folder for frontier.json, frontier.svg and frontier.png.",
            rich_help_panel=OUTPUT,
        ),
    ] = Path("frontier"),
    as_json: AsJson = False,
) -> None:
    """Measure what lossy rules gain on your pair, and what they give up.

    Compares all rules that verify single tokens on the same distributions: how often each accepts,
    and how far its output strays from the target. Then lets methods write, and sets their speed
    against the perplexity that the target gives their texts. Some two minutes on the embedded pair:

      outrider frontier

    A pair and prompts of your own:

      outrider frontier -f prompts.txt --target big/ --draft small/ \\
        --temperature 0.8

    Ends with code 1 if some rule accepts more than the best one, mentored decoding, at the same
    divergence at the same place: one of the two is then wrong.
    """
    require_draft(models, "frontier")
    if models.target != EMBEDDED and file is None:
        raise fail("no prompts: give -f FILE, with texts such as the pair is for")
    if truncation.temperature == 0:
        raise fail(
            "--temperature 0.0: must be above 0, where the distributions are more than one token"
        )
    prompts = list(PROMPTS) if file is None else read_prompts(file)
    if not prompts:
        raise fail(f"no prompts in '{file}': write one per line")
    start()
    import outrider.lab.frontier as bench
    from outrider.lab import plots
    from outrider.lab.metadata import run_metadata
    from outrider.sampling import Sampling

    plots.require_matplotlib()
    sampling = Sampling(
        **vars(truncation),
        **vars(penalties),
        seed=seed,
        max_new_tokens=max_new_tokens,
    )
    _check_writable(out)
    speculation = Speculation(num_speculative_tokens=num_speculative_tokens)
    engine = open_engine(models, speculation)
    require_decoder_only(engine, "frontier")
    assert engine.draft is not None
    encoded = _encoded(engine, prompts, max_new_tokens)
    with Progress(quiet=as_json) as progress:
        progress.show("sampling positions")
        distributions = bench.paired_distributions(
            engine.target, engine.draft, encoded, sampling, positions
        )
        plane = bench.compare_rules(*distributions, bench.FAMILIES, progress.show)
        generations: list[dict[str, Any]] = []
        if not no_generations:
            generations = bench.generate(
                engine.target,
                engine.draft,
                encoded,
                sampling,
                engine.num_speculative_tokens,
                repeats=repeats,
                texts_per_prompt=texts,
                settings=bench.SETTINGS,
                progress=progress.show,
            )
        about = run_metadata(
            **vars(models)
            | {
                "draft": models.draft or EMBEDDED,
                "dtype": str(engine.target.dtype).removeprefix("torch."),
                "device": str(engine.target.device),
            },
            num_speculative_tokens=engine.num_speculative_tokens,
            **vars(truncation),
            **vars(penalties),
            seed=seed,
            max_new_tokens=max_new_tokens,
            prompts=len(prompts),
            positions=len(distributions[0]),
            repeats=repeats,
            texts_per_prompt=texts,
        )
        document = {"about": about, "plane": plane.as_dict(), "generations": generations}
        progress.show("drawing")
        try:
            out.mkdir(parents=True, exist_ok=True)
            bench.write(document, out / "frontier.json")
            plots.frontier(document, out)
        except OSError as error:
            raise fail(f"cannot write to '{out}': {error.strerror or error}") from error
    if as_json:
        typer.echo(bench.dumps(document))
    else:
        from outrider.cli.frontier_table import show

        show(document)
        typer.echo(f"wrote {out / 'frontier'}.json, .svg and .png", err=True)
    if not plane.envelope.holds:
        raise typer.Exit(FAILED)


def _check_writable(folder: Path) -> None:
    """Sees whether a folder can be written to, or made, before any work is done; makes none, since
    the work may be interrupted."""
    there = next((each for each in (folder, *folder.absolute().parents) if each.exists()), folder)
    try:
        with tempfile.TemporaryFile(dir=there):
            pass
    except OSError as error:
        raise fail(f"cannot write to --out '{folder}': {error.strerror or error}") from error


def _encoded(engine: "Engine", prompts: list[str], room: int) -> list[tuple[int, ...]]:
    encoded = [engine.encode(prompt) for prompt in prompts]
    longest = max(map(len, encoded))
    if longest + room > engine.shared_limit:
        raise fail(
            f"a prompt of {longest} tokens and {room} new ones do not fit into the context of "
            f"{engine.shared_limit}: shorten it, or take a smaller --max-new-tokens"
        )
    return encoded

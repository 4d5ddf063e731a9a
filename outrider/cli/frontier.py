"""``outrider frontier``: acceptance and speed of lossy rules against their divergence."""

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
from outrider.cli.prompt import encode_prompts, read_prompts
from outrider.cli.start import start

if TYPE_CHECKING:
    pass

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
            "Default for the embedded pair: a few short Python prompts.",
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
            help="Positions of the target's own outputs at which all rules are compared.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 192,
    repeats: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Repetitions of the speed measurement; in each, the settings take turns.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 3,
    texts: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Outputs per prompt and setting for the perplexity, in addition to the timed "
            "ones.",
            rich_help_panel=_MEASUREMENT,
        ),
    ] = 8,
    no_generations: Annotated[
        bool,
        typer.Option(
            "--no-generations",
            help="Compare the rules at single positions only; generate no outputs.",
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
    """Measure how much speed lossy methods gain on your pair, and at what divergence.

    Compares all rules that verify token by token on the same distributions: how often each rule
    accepts a token, and how far its output diverges from the target. Then generates with the lossy
    methods, and compares their speed with the perplexity of their output under the target. Takes
    about two minutes on the embedded pair:

      outrider frontier

    A pair and prompts of your own:

      outrider frontier -f prompts.txt --target big/ --draft small/ \\
        --temperature 0.8

    Mentored decoding is the optimal rule. Exits with code 1 if another rule accepts more at the
    same divergence and position, since one of the two must then be wrong.
    """
    require_draft(models, "frontier")
    if models.target != EMBEDDED and file is None:
        raise fail("no prompts: pass -f FILE with prompts like those that the pair will get")
    if truncation.temperature == 0:
        raise fail(
            "--temperature 0.0: must be above 0, since at 0 every distribution is a point mass"
        )
    prompts = list(PROMPTS) if file is None else read_prompts(file)
    if not prompts:
        raise fail(f"no prompts in '{file}': write one per line")
    start()
    import outrider.lab.frontier as lab
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
    engine = open_engine(models, speculation.with_fixed_length)
    require_decoder_only(engine, "frontier")
    assert engine.draft is not None
    encoded = encode_prompts(engine, prompts, max_new_tokens, "--max-new-tokens")
    with Progress(quiet=as_json) as progress:
        progress.show("sampling positions")
        distributions = lab.paired_distributions(
            engine.target, engine.draft, encoded, sampling, positions
        )
        plane = lab.compare_rules(*distributions, lab.FAMILIES, progress.show)
        generations: list[dict[str, Any]] = []
        if not no_generations:
            generations = lab.generate(
                engine.target,
                engine.draft,
                encoded,
                sampling,
                engine.num_speculative_tokens,
                repeats=repeats,
                texts_per_prompt=texts,
                settings=lab.SETTINGS,
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
            lab.write(document, out / "frontier.json")
            plots.frontier(document, out)
        except OSError as error:
            raise fail(f"cannot write to '{out}': {error.strerror or error}") from error
    if as_json:
        typer.echo(lab.dumps(document))
    else:
        from outrider.cli.frontier_table import show

        show(document)
        typer.echo(f"wrote {out / 'frontier'}.json, .svg and .png", err=True)
    if not plane.envelope.holds:
        raise typer.Exit(FAILED)


def _check_writable(folder: Path) -> None:
    """Fails if the folder, or the parent in which it would be created, is not writable.

    Does not create the folder, since the work before the first write may be interrupted.
    """
    existing = next(
        (each for each in (folder, *folder.absolute().parents) if each.exists()), folder
    )
    try:
        with tempfile.TemporaryFile(dir=existing):
            pass
    except OSError as error:
        raise fail(f"cannot write to --out '{folder}': {error.strerror or error}") from error

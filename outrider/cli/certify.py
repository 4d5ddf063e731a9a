"""``outrider certify``: checks whether a method is lossless on a pair of models and settings."""

import importlib
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.cli.engines import open_engine, require_decoder_only, require_draft_of
from outrider.cli.errors import FAILED, fail
from outrider.cli.options.models import Models
from outrider.cli.options.output import AsJson
from outrider.cli.options.sampling import Penalties, Seed, Truncation
from outrider.cli.options.speculation import SPECULATION, Speculation
from outrider.cli.progress import Progress
from outrider.cli.prompt import encode_prompts, read_prompts
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.engine import Engine
    from outrider.lab.certify import Certificate
    from outrider.sampling import Sampling

PROMPTS = (
    "def read_lines(path):\n    ",
    "class Stack:\n    def __init__(self",
    "import argparse\n\n\ndef main():\n",
)
_CHECKS = "Checks"
_MAX_PROBABILITIES = 1 << 25  # probabilities that one batch's distributions may hold
_MAX_ROWS = 128


def certify(
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Prompts to test on: one per line, or JSON lines with a 'prompt' if FILE ends "
            "in .jsonl. Default: a few short Python prompts.",
        ),
    ] = None,
    *,
    models: Models,
    speculation: Speculation,
    verifier: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Your own verification rule in place of the method's: an object, or a class "
            "that can be called without arguments.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    drafter: Annotated[
        str | None,
        typer.Option(
            metavar="MODULE:NAME",
            help="Your own drafter: a callable that takes the draft model and the size of the "
            "target's vocabulary, like ModelDrafter.",
            rich_help_panel=SPECULATION,
        ),
    ] = None,
    truncation: Truncation,
    penalties: Penalties,
    seed: Seed = 0,
    positions: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Positions at which the emitted distribution is compared exactly with the "
            "target's.",
            rich_help_panel=_CHECKS,
        ),
    ] = 256,
    samples: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Outputs to generate with the method, and as many with plain decoding. Detecting "
            "a deviation a tenth as large takes 100 times as many.",
            rich_help_panel=_CHECKS,
        ),
    ] = 768,
    length: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, help="Tokens in each of these outputs.", rich_help_panel=_CHECKS
        ),
    ] = 4,
    as_json: AsJson = False,
) -> None:
    """Check whether a method is lossless on your own models and settings.

    Runs real rounds and compares the output distribution with the target's: exactly at single
    positions, by enumeration for whole rounds, and by counting tokens over whole outputs. Reports
    the deviation that it measured and the smallest one that it could have detected. Takes about a
    minute on the embedded pair:

      outrider certify

    Check your own rule, or see a wrong one fail:

      outrider certify --verifier outrider.testing.mutants:ResidualFromTarget

    Exits with code 1 if the rule does not keep its claim. For a lossy rule the claim is its bound.
    """
    prompts = list(PROMPTS) if file is None else read_prompts(file)
    require_draft_of(speculation.method, models)
    start()
    import torch

    from outrider.lab.certify import certify as run
    from outrider.sampling import Sampling, Warp

    sampling = Sampling(
        **vars(truncation),
        **vars(penalties),
        seed=seed,
    )
    rule: Any = None if verifier is None else _make("--verifier", verifier)
    own_drafter: Any = None if drafter is None else load_object("--drafter", drafter)
    engine = open_engine(models, speculation.with_fixed_length, verifier=rule)
    require_decoder_only(engine, "certify")
    num_tokens = engine.target.num_tokens
    rows = _MAX_PROBABILITIES // ((engine.num_speculative_tokens + 1) * num_tokens)
    with Progress(as_json) as progress, torch.inference_mode():
        certificate = run(
            engine.target,
            engine.drafter if own_drafter is None else own_drafter(engine.draft, num_tokens),
            engine.verifier_at(truncation.temperature),
            encode_prompts(engine, prompts, length, "--length"),
            lambda num_rows: Warp([sampling] * num_rows, num_tokens, engine.target.device),
            engine.num_speculative_tokens,
            num_positions=positions,
            num_samples=samples,
            length=length,
            seed=seed,
            device=engine.target.device,
            limit=engine.shared_limit,
            batch_size=max(4, min(_MAX_ROWS, rows)),
            progress=lambda stage: progress.show(f"checking: {stage}"),
        )
    if as_json:
        settings = _settings(engine, engine.method.name, sampling, len(prompts))
        typer.echo(json.dumps(settings | certificate.as_dict(), ensure_ascii=False))
    else:
        _print(certificate, engine, engine.method.name, sampling)
    if not certificate.passed:
        raise typer.Exit(FAILED)


def load_object(flag: str, path: str) -> Any:
    """The object that ``MODULE:NAME`` names; the module may be in the current folder."""
    module_name, colon, name = path.partition(":")
    if not (module_name and colon and name):
        raise fail(f"{flag} {path!r}: write MODULE:NAME, such as my_rules:MyRule")
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found: Any = importlib.import_module(module_name)
    except ImportError as error:
        raise fail(f"{flag} {path}: cannot import {module_name!r}: {error}") from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise fail(f"{flag} {path}: {module_name!r} has no {name!r}")
        found = getattr(found, part)
    return found


def _make(flag: str, path: str) -> Any:
    """The verification rule that ``MODULE:NAME`` names, checked for the attributes of a rule."""
    rule = load_object(flag, path)
    if isinstance(rule, type):
        try:
            rule = rule()
        except TypeError as error:
            raise fail(f"{flag} {path}: a class is called without arguments: {error}") from None
    missing = [
        name for name in ("lossless", "accepts", "needs", "bound") if not hasattr(rule, name)
    ]
    if missing or not callable(rule):
        what = ", ".join(missing) or "__call__"
        raise fail(f"{flag} {path}: this is no verification rule: it has no {what}")
    return rule


def _settings(
    engine: "Engine", method: str, sampling: "Sampling", num_prompts: int
) -> dict[str, Any]:
    return {
        "target": engine.target.name,
        "draft": None if engine.draft is None else engine.draft.name,
        "method": method,
        "dtype": str(engine.target.dtype).removeprefix("torch."),
        "num_speculative_tokens": engine.num_speculative_tokens,
        "temperature": sampling.temperature,
        "num_prompts": num_prompts,
    }


def _print(certificate: "Certificate", engine: "Engine", method: str, sampling: "Sampling") -> None:
    from rich import box
    from rich.table import Table

    from outrider.lab.certify.report import FALSE_ALARM

    console = Console(highlight=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    table.add_column("check", style="bold", no_wrap=True)
    table.add_column("result", no_wrap=True)
    table.add_column("number", justify="right", no_wrap=True)
    table.add_column("explanation", overflow="fold")
    styles = {"pass": "green", "FAIL": "bold red", "-": "dim"}
    for check in certificate.checks:
        number = "" if check.number is None else f"{check.number:.2g}"
        mark = f"[{styles[check.mark]}]{check.mark}[/]"
        table.add_row(check.name, mark, number, check.words.replace("[", r"\["))
    dtype = str(engine.target.dtype).removeprefix("torch.")
    console.print(
        f"{certificate.rule} in method {method}, γ {engine.num_speculative_tokens}, temperature "
        f"{sampling.temperature:g}, {dtype} on {engine.target.device}",
        markup=False,
    )
    console.print(table)
    console.print(certificate.verdict, style="bold" if certificate.passed else "bold red")
    if not certificate.greedy:
        chance = f"with probability {FALSE_ALARM:g}"
        console.print(f"All counts together reject a correct method {chance}.", style="dim")

"""``outrider demo``: plain and speculative decoding with the embedded pair."""

import time
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.segment import Segment, Segments
from rich.style import Style

from outrider import __version__
from outrider.cli.compare import Comparison, against_plain
from outrider.cli.engines import (
    CompilingTakesLongError,
    open_engine,
    plain_engine,
    require_draft,
)
from outrider.cli.errors import FAILED, INTERRUPTED, say
from outrider.cli.follow import CANCELLED, follow, warm_up
from outrider.cli.options.models import DemoModels, MaxMemory, Models
from outrider.cli.options.sampling import SAMPLING, Seed
from outrider.cli.options.speculation import NumSpeculativeTokens, Speculation
from outrider.cli.start import start
from outrider.cli.summary import summary_line
from outrider.cli.trace import Painter, has_colour, legend

if TYPE_CHECKING:
    from outrider.engine import Engine, Result
    from outrider.sampling import Sampling

PROMPTS = (
    "def get_item(items, key, default=None):\n    try:\n        return items[key]\n    except",
    "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def __eq__(self, other):\n        if not",
    "def read_text(path):\n    with open(path, encoding=",
    'class Config:\n    """Configuration of the server.\n\n    ',
)
STOP = (
    "\n\n\n",
    "\n\n    def",
)  # one function or method; small models repeat themselves after it
TOP_P = {0.0: 1.0, 0.8: 0.9}  # by temperature
_MAX_TOKENS, _MIN_TOKENS = 96, 16
_MOST_COMPILING = 120.0  # seconds after which no further program is compiled
_SECONDS = 32.0  # of generation; loading and warming up come on top
_LAST_START = 40.0  # seconds after which no further prompt is started


@dataclass
class Tally:
    """Results at one temperature."""

    plain: list["Result"] = field(default_factory=list)
    speculative: list["Result"] = field(default_factory=list)
    comparisons: list[Comparison] = field(default_factory=list)


def demo(
    models: DemoModels,
    max_memory: MaxMemory = None,
    num_speculative_tokens: NumSpeculativeTokens = None,
    seed: Seed = 0,
    max_new_tokens: Annotated[
        int | None,
        typer.Option(
            "--max-new-tokens",
            "-n",
            metavar="N",
            help="Tokens per output. Default: as many as this machine generates in half a minute, "
            "at most 96.",
            rich_help_panel=SAMPLING,
        ),
    ] = None,
) -> None:
    """Demonstrate speculative decoding on the small models that come with Outrider.

    Completes a few Python functions with and without speculation, at temperature 0 and 0.8. Shows
    the origin of each token, both speeds, and whether the greedy outputs are identical:

      outrider demo

    The first time, it compiles the models for a minute or two; --compile off leaves that out.

    Exits with code 1 if greedy outputs differ by more than rounding explains.
    """
    require_draft(models, "demo")
    start(compiles=models.compiles)
    from outrider.sampling import Sampling

    speculation = Speculation(num_speculative_tokens=num_speculative_tokens).with_fixed_length
    engine = _open(models, speculation, max_memory)
    plain = plain_engine(engine)
    console = Console(highlight=False)
    _introduce(console, engine)
    trial = Sampling(temperature=0.8, seed=seed, max_new_tokens=8)
    with console.status("warming up"):
        for each in (engine, plain, engine):
            warm_up(each, PROMPTS[0], trial)
        speed = warm_up(plain, PROMPTS[0], trial)
    tokens = max_new_tokens or _affordable(speed)
    console.print(legend(console), end="", soft_wrap=True)
    tallies = {temperature: Tally() for temperature in TOP_P}
    began = time.monotonic()
    for number, prompt in enumerate(PROMPTS, 1):
        if time.monotonic() - began > _LAST_START:
            left = len(PROMPTS) - number + 1
            console.print(f"skipped {left} of {len(PROMPTS)} prompts: this machine is busy")
            break
        for temperature, tally in tallies.items():
            top_p = TOP_P[temperature]
            sampling = Sampling(
                temperature, top_p=top_p, seed=seed, max_new_tokens=tokens, stop=STOP
            )
            cut = "" if top_p == 1 else f", top-p {top_p:g}"
            title = f"{number}, temperature {temperature:g}{cut}"
            console.rule(title, style="dim", align="left")
            _race(console, engine, plain, prompt, sampling, tally)
    _report(console, tallies)
    if any(c.failed for tally in tallies.values() for c in tally.comparisons):
        raise typer.Exit(FAILED)


def _open(models: Models, speculation: Speculation, max_memory: str | None) -> "Engine":
    """The engine, compiled if that does not take too long: both speeds that it shows are those of
    compiled programs, or both are not."""
    try:
        return open_engine(
            models,
            speculation,
            max_memory=max_memory,
            time_left=True,
            most_seconds=_MOST_COMPILING,
        )
    except CompilingTakesLongError:
        say(
            f"note: the models are not compiled after {_MOST_COMPILING:g} s, so both speeds are "
            f"those without a compiler; once outrider compile has run, they are higher"
        )
    return open_engine(replace(models, compile="off"), speculation, max_memory=max_memory)


def _affordable(plain_speed: float) -> int:
    """Tokens per output for which all outputs, at the speed of plain decoding, take _SECONDS."""
    outputs = 2 * len(PROMPTS) * len(TOP_P)
    return int(min(_MAX_TOKENS, max(_MIN_TOKENS, _SECONDS * plain_speed / outputs)))


def _introduce(console: Console, engine: "Engine") -> None:
    target, draft = engine.target, engine.draft
    assert draft is not None
    dtype = str(target.dtype).removeprefix("torch.")
    console.print(f"[bold]Outrider {__version__}[/bold], {dtype} on {target.device}")
    for name, model in (("target", target), ("draft", draft)):
        size = sum(weight.numel() for weight in model.module.parameters()) / 1e6
        layers = "1 layer" if model.num_layers == 1 else f"{model.num_layers} layers"
        console.print(f"{name:7}{size:.1f} million parameters in {layers}")
    console.print(
        f"the draft proposes up to {engine.num_speculative_tokens} tokens per target pass"
    )


def _race(
    console: Console,
    engine: "Engine",
    plain: "Engine",
    prompt: str,
    sampling: "Sampling",
    tally: Tally,
) -> None:
    """Completes one prompt with plain decoding, then speculatively with its trace."""
    with console.status("plain decoding of the same prompt"):
        reference = plain.generate(prompt, sampling)
    colour = has_colour(console)
    dim = Style(dim=True) if colour else None
    console.print(Segments([Segment(prompt, dim)]), end="", soft_wrap=True)
    painter = Painter(engine, engine.encode(prompt), colour)
    result = follow(
        engine,
        prompt,
        sampling,
        lambda event: console.print(painter.paint(event), end="", soft_wrap=True),
    )
    if not result.text.endswith("\n"):
        console.print()
    if result.finish_reason == CANCELLED:
        say("interrupted")
        raise typer.Exit(INTERRUPTED)
    console.print(summary_line(result), style="dim", soft_wrap=True)
    tally.plain.append(reference)
    tally.speculative.append(result)
    tally.comparisons.append(against_plain(engine, result, reference, sampling.greedy))


def _report(console: Console, tallies: dict[float, Tally]) -> None:
    from rich import box
    from rich.table import Table

    from outrider.engine import Stats

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for title in (
        "temperature",
        "plain\ntokens/s",
        "speculative\ntokens/s",
        "speed-up",
        "acceptance\nlength",
        "acceptance\nrate",
        "\nα",
    ):
        table.add_column(title, justify="right", no_wrap=True, vertical="bottom")
    for temperature, tally in tallies.items():
        plain = Stats.total(result.stats for result in tally.plain)
        fast = Stats.total(result.stats for result in tally.speculative)
        table.add_row(
            f"{temperature:g}",
            f"{plain.tokens_per_second:.1f}",
            f"{fast.tokens_per_second:.1f}",
            f"{fast.tokens_per_second / plain.tokens_per_second:.2f}×",
            f"{fast.acceptance_length:.2f}",
            f"{fast.acceptance_rate:.0%}",
            f"{fast.alpha:.2f}",
        )
    console.rule("speed", style="dim", align="left")
    console.print(table)
    console.print(
        "acceptance length: tokens per target pass; 1 for plain decoding\n"
        "acceptance rate: accepted tokens / drafted tokens\n"
        "α: overlap of the draft's and the target's distribution, averaged over positions",
        style="dim",
    )
    _report_greedy(console, tallies[0.0])
    console.print("next: [bold]outrider generate --trace[/bold] with a prompt of your own")


def _report_greedy(console: Console, tally: Tally) -> None:
    console.rule("plain and speculative output at temperature 0", style="dim", align="left")
    for number, comparison in enumerate(tally.comparisons, 1):
        difference = comparison.first_difference
        identical = f"identical, {len(comparison.plain.token_ids)} tokens"
        console.print(f"{number}  {difference or identical}", markup=False, soft_wrap=True)
    differences = [comparison.first_difference for comparison in tally.comparisons]
    if any(each is not None and each.near_tie for each in differences):
        console.print(
            "near-tie: a forward pass over many tokens rounds differently from a pass over\n"
            "one, so two almost equal logits may change places",
            style="dim",
        )

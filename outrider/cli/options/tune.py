"""Options of ``outrider tune``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options.bench import GRID, OUTPUT, RUN, IgnoreEos, MinP, Seed, TopK, TopP, _option

Methods = Annotated[
    list[str] | None,
    _option(
        "--method",
        panel=GRID,
        metavar="NAME[:OPTION=VALUE,...]",
        help="Choose among these methods only, each with every draft that fits it. May be "
        "repeated. Default: each draft by its own method, prompt lookup, suffix decoding, an "
        "n-gram table of the target's answers, early exit.",
    ),
]
BatchSizes = Annotated[
    list[int] | None,
    _option(
        "--batch-size",
        panel=GRID,
        metavar="N",
        help="Requests that run together. May be repeated. Default: 1, 4 and 16.",
        min=1,
    ),
]
Longest = Annotated[
    int,
    _option(
        "--num-speculative-tokens",
        panel=GRID,
        metavar="N",
        help="The longest draft to consider.",
        min=1,
        max=64,
    ),
]
Temperature = Annotated[
    float, _option(panel=GRID, metavar="T", help="0 always takes the most probable token.")
]
DivergenceBudget = Annotated[
    float | None,
    _option(
        panel=GRID,
        metavar="NATS",
        help="Also consider lossy methods that diverge from the target by at most this much per "
        "token, KL(target||output).",
    ),
]
MetricName = Annotated[
    str | None,
    _option(
        "--metric",
        panel=GRID,
        metavar="NAME",
        help="Also consider lossy methods whose outputs reach a share of the target's own score: "
        "exact_match, rouge_l or bleu, against references.",
    ),
]
AtLeast = Annotated[
    float,
    _option(
        "--at-least",
        panel=GRID,
        metavar="X",
        help="The share of the target's own score that --metric demands, up to 1.",
    ),
]
References = Annotated[
    Path | None,
    _option(
        "--references",
        panel=GRID,
        metavar="FILE",
        help="The references for --metric: one per line of a text, or the field reference of each "
        "record. Default: those of the data set.",
    ),
]
Minutes = Annotated[
    float,
    _option(panel=RUN, metavar="M", help="The time that tuning may take, loading included."),
]
MaxNewTokens = Annotated[
    int,
    _option("--max-new-tokens", "-n", panel=RUN, metavar="N", help="Maximum number of new tokens."),
]
Output = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="The configuration to write, which the other commands read.",
        rich_help_panel=OUTPUT,
    ),
]
Plot = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also draw the speed-ups, as .svg or .png. Needs the extra bench.",
        rich_help_panel=OUTPUT,
    ),
]
Export = Annotated[
    str | None,
    typer.Option(
        metavar="ENGINE",
        help="Print the answer for another engine: vllm, transformers or llama.cpp.",
        rich_help_panel=OUTPUT,
    ),
]


@dataclass(frozen=True)
class TuneGrid:
    """What is compared."""

    method: Methods = None
    batch_size: BatchSizes = None
    num_speculative_tokens: Longest = 8
    temperature: Temperature = 0.0
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    divergence_budget: DivergenceBudget = None
    metric: MetricName = None
    at_least: AtLeast = 0.95
    references: References = None


@dataclass(frozen=True)
class TuneRun:
    """How it is measured."""

    minutes: Minutes = 5.0
    max_new_tokens: MaxNewTokens = 64
    seed: Seed = None
    ignore_eos: IgnoreEos = False

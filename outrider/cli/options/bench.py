"""Options of ``outrider bench``; what is not given comes from the plan's file, or by default."""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, get_args

import typer

from outrider.cli.options import models
from outrider.cli.options.speculation import complete_methods

GRID, DATA, RUN, OUTPUT = "What is compared", "Data", "The run", "Output"


def _option(*names: str, panel: str, metavar: str, help: str, **more: Any) -> Any:
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel, **more)


Plan = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="A plan in TOML; options given here replace its values.",
    ),
]
Methods = Annotated[
    list[str] | None,
    _option(
        "--method",
        panel=GRID,
        metavar="NAME[:OPTION=VALUE,...]",
        help="A method with its options, such as mjsd:beams=8,threshold=0.1; `outrider methods` "
        "lists them. gamma=N and draft=MODEL set a draft length and a draft of its own, label=TEXT "
        "its name in the table. May be repeated. Plain decoding always runs, too. Default: "
        "speculative.",
        autocompletion=complete_methods,
    ),
]
Gammas = Annotated[
    list[int] | None,
    _option(
        "--gamma",
        "--num-speculative-tokens",
        panel=GRID,
        metavar="N",
        help="Draft length of every method that drafts, 1 to 64. May be repeated. Default: the "
        "method's own.",
    ),
]
Temperatures = Annotated[
    list[float] | None,
    _option(
        "--temperature",
        panel=GRID,
        metavar="T",
        help="0 always takes the most probable token. May be repeated. Default: 0.",
    ),
]
BatchSizes = Annotated[
    list[int] | None,
    _option(
        "--batch-size",
        panel=GRID,
        metavar="N",
        help="Requests that start together and run in one batch. May be repeated. Default: 1.",
    ),
]
TopK = Annotated[
    int | None, _option(panel=GRID, metavar="K", help="Keep the K most probable tokens.")
]
TopP = Annotated[
    float | None,
    _option(panel=GRID, metavar="P", help="Keep the most probable tokens up to a total of P."),
]
MinP = Annotated[
    float | None,
    _option(
        panel=GRID,
        metavar="P",
        help="Keep tokens at least P times as probable as the most probable one.",
    ),
]
Baseline = Annotated[
    str | None,
    _option(
        panel=GRID,
        metavar="METHOD",
        help="The method that speed-ups are relative to. Default: plain.",
    ),
]

Data = Annotated[
    list[str] | None,
    _option(
        "--data",
        panel=DATA,
        metavar="SOURCE",
        help="Prompts: a .jsonl, .csv, .parquet or .txt file, in the layout of Spec-Bench, "
        "MT-bench, SPEED-Bench, HumanEval or GSM8K or with a 'prompt' or 'messages' each; "
        "hf:NAME:SPLIT:FIELD; builtin:code, builtin:copy or builtin:prose. May be repeated. "
        "Default for the embedded pair: builtin:code.",
    ),
]
Limit = Annotated[
    int | None,
    _option(
        panel=DATA,
        metavar="N",
        help="At most N prompts of each task, spread evenly over the file.",
        min=1,
    ),
]
Tasks = Annotated[
    list[str] | None,
    _option("--task", panel=DATA, metavar="NAME", help="Only this task. May be repeated."),
]
Prompts = Annotated[
    str | None,
    _option(
        panel=DATA,
        metavar="FORM",
        help="auto: conversations go through the model's chat template, texts are continued; chat: "
        "all are conversations; text: all are texts.",
    ),
]

MaxNewTokens = Annotated[
    int | None,
    _option(
        "--max-new-tokens",
        "-n",
        panel=RUN,
        metavar="N",
        help="Maximum number of new tokens. Default: 64.",
    ),
]
Repeats = Annotated[
    int | None,
    _option(panel=RUN, metavar="N", help="Repeats of every cell. Default: 3."),
]
MaxRepeats = Annotated[
    int | None,
    _option(
        panel=RUN,
        metavar="N",
        help="Most repeats of a cell whose speed-up may differ by more than 5 % in another run. "
        "Default: 9.",
    ),
]
Warmup = Annotated[
    int | None,
    _option(
        panel=RUN, metavar="N", help="Batches that each engine runs untimed before. Default: 1."
    ),
]
Seed = Annotated[
    int | None,
    _option(panel=RUN, metavar="N", help="Random seed of the first repeat. Default: 0."),
]
IgnoreEos = Annotated[
    bool,
    typer.Option(
        "--ignore-eos",
        help="Continue after an end-of-sequence token, so that all outputs have the same length.",
        rich_help_panel=RUN,
    ),
]
Metrics = Annotated[
    list[str] | None,
    _option(
        "--metric",
        panel=RUN,
        metavar="NAME",
        help="A metric of the outputs, such as perplexity. May be repeated; an unknown name lists "
        "all.",
    ),
]
Meters = Annotated[
    list[str] | None,
    _option(
        "--meter",
        panel=RUN,
        metavar="NAME",
        help="A meter that is read around each repeat, such as an energy counter. May be repeated; "
        "an unknown name lists all.",
    ),
]
Energy = Annotated[
    bool,
    typer.Option(
        "--energy",
        help="Measure joules by the machine's counters, or estimate them where it has none: "
        "--meter energy.",
        rich_help_panel=RUN,
    ),
]
RunGeneratedCode = Annotated[
    bool,
    typer.Option(
        "--run-generated-code",
        help="Let the metric pass@k run code that the model wrote, in a sandbox.",
        rich_help_panel=RUN,
    ),
]
Threads = Annotated[
    int | None,
    _option(panel=RUN, metavar="N", help="Threads of torch. Default: torch's own."),
]
Folder = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="DIR",
        help="Folder for cells.jsonl, one result per line, and journal.jsonl, from which an "
        "interrupted run goes on.",
        rich_help_panel=OUTPUT,
    ),
]
Report = Annotated[
    Path | None,
    typer.Option(
        metavar="FILE",
        help="Also write a report of the results: one HTML file with charts, sample outputs and "
        "the raw data, or tables in Markdown if its name ends in .md. `outrider report` writes it "
        "later. Needs the extra bench.",
        rich_help_panel=OUTPUT,
    ),
]
AsJson = Annotated[
    bool,
    typer.Option(
        "--json", help="Print one JSON line per cell instead of tables.", rich_help_panel=OUTPUT
    ),
]


def _same(option: Any) -> Any:
    """What the commands on a single pair say of an option. Here None, the value of the plan, is a
    value too."""
    return get_args(option)[1]


Target = Annotated[str | None, _same(models.Target)]
Drafts = Annotated[
    list[str] | None,
    _option(
        "--draft",
        panel=models.MODELS,
        metavar="MODEL",
        help="A draft model, or the folder of a head. May be repeated: each method runs with each "
        "that fits it.",
    ),
]
Dtype = Annotated[str | None, _same(models.Dtype)]
Device = Annotated[str | None, _same(models.Device)]
Compile = Annotated[str | None, _same(models.Compile)]
KvDtype = Annotated[str | None, _same(models.KvDtype)]


class _Settings:
    """Settings by the names that plans have; None and False are not given."""

    def given(self) -> dict[str, Any]:
        """The settings that the user gave."""
        values = {field.name: getattr(self, field.name) for field in fields(self)}  # type: ignore[arg-type]
        return {
            name: value
            for name, value in values.items()
            if value is not None and value is not False and value != []
        }


@dataclass(frozen=True)
class Grid(_Settings):
    """What is compared."""

    methods: Methods = None
    gammas: Gammas = None
    temperatures: Temperatures = None
    batch_sizes: BatchSizes = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    baseline: Baseline = None


@dataclass(frozen=True)
class Prompting:
    """The data sets, and which of their prompts are used how."""

    data: Data = None
    limit: Limit = None
    task: Tasks = None
    prompts: Prompts = None


@dataclass(frozen=True)
class Run(_Settings):
    """How the cells are measured."""

    max_new_tokens: MaxNewTokens = None
    repeats: Repeats = None
    max_repeats: MaxRepeats = None
    warmup: Warmup = None
    seed: Seed = None
    ignore_eos: IgnoreEos = False
    metrics: Metrics = None
    meters: Meters = None
    threads: Threads = None


@dataclass(frozen=True)
class BenchModels(_Settings):
    """The models and how they run."""

    target: Target = None
    drafts: Drafts = None
    dtype: Dtype = None
    device: Device = None
    compile: Compile = None
    kv_dtype: KvDtype = None
    quantize_target: models.QuantizeTarget = None
    quantize_draft: models.QuantizeDraft = None
    exact: models.Exact = False
    trust_remote_code: models.TrustRemoteCode = False

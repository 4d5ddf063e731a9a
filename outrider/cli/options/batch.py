"""Options of ``outrider batch``."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

from outrider.cli.options.speculation import SPECULATION, Speculation

LINES, WORKERS = "Lines", "Workers"

PromptsArgument = Annotated[
    Path,
    typer.Argument(metavar="PROMPTS", help="The prompts, a JSON object per line (JSON Lines)."),
]
Out = Annotated[
    Path,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="The answers, a line for each line of PROMPTS, in the same order.",
        rich_help_panel=LINES,
    ),
]
Overwrite = Annotated[
    bool, typer.Option("--overwrite", help="Replace an output that exists.", rich_help_panel=LINES)
]
Chat = Annotated[
    bool,
    typer.Option(
        "--chat",
        help="Answer a line's prompt as a user's message, by the model's chat template.",
        rich_help_panel=LINES,
    ),
]
System = Annotated[
    str | None,
    typer.Option(metavar="TEXT", help="The system prompt of --chat.", rich_help_panel=LINES),
]
ServedModelName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME",
        help="How lines in OpenAI's batch format call the model. Default: the name of the target.",
        rich_help_panel=LINES,
    ),
]
Workers = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Worker processes. Each loads the models; they share the processors, and take the "
        "GPUs in turn.",
        rich_help_panel=WORKERS,
    ),
]
BatchSize = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Prompts that a worker answers at the same time.",
        rich_help_panel=WORKERS,
    ),
]
BlockLines = Annotated[
    int,
    typer.Option(
        metavar="N",
        min=1,
        help="Lines of a block, which a worker answers and the output keeps as a whole; what an "
        "interruption costs each worker.",
        rich_help_panel=WORKERS,
    ),
]
Ray = Annotated[
    str | None,
    typer.Option(
        metavar="ADDRESS",
        help="Run the workers on a Ray cluster, such as auto or HOST:6379, or on a Ray that is "
        "started here: local. Needs the extra 'cluster'.",
        rich_help_panel=WORKERS,
    ),
]
CpusPerWorker = Annotated[
    float,
    typer.Option(
        metavar="N",
        min=0,
        help="Processors that a worker reserves on the cluster.",
        rich_help_panel=WORKERS,
    ),
]
GpusPerWorker = Annotated[
    float,
    typer.Option(
        metavar="N",
        min=0,
        help="GPUs that a worker reserves on the cluster.",
        rich_help_panel=WORKERS,
    ),
]
MethodOptions = Annotated[
    list[str] | None,
    typer.Option(
        "--option",
        metavar="NAME=VALUE",
        help="An option of the method, such as budget=0.2 for 'mentored'; `outrider methods` "
        "lists them. May be repeated.",
        rich_help_panel=SPECULATION,
    ),
]


@dataclass(frozen=True)
class BatchSpeculation(Speculation):
    """The decoding method and its drafts; ``-o`` is the output here."""

    option: MethodOptions = None


@dataclass(frozen=True)
class Lines:
    """What lines mean."""

    chat: Chat = False
    system: System = None
    served_model_name: ServedModelName = None
    overwrite: Overwrite = False


@dataclass(frozen=True)
class Fleet:
    """The workers."""

    workers: Workers = 1
    batch_size: BatchSize = 32
    block_lines: BlockLines = 256
    ray: Ray = None
    cpus_per_worker: CpusPerWorker = 1.0
    gpus_per_worker: GpusPerWorker = 0.0

"""Options of ``outrider plan``: models, hardware, what is asked, and the simulation."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer

_MODELS, _HARDWARE, _LOAD = "Models", "Hardware", "Load"
_SIMULATION = "Simulation"


def _gpu_number(help: str, metavar: str = "X") -> typer.models.OptionInfo:
    """An option for a number of the GPU."""
    return typer.Option(metavar=metavar, help=help, rich_help_panel=_HARDWARE)


@dataclass(frozen=True)
class PlannedModels:
    """What the models cost."""

    target: Annotated[
        str,
        typer.Option(
            "--target",
            "--target-config",
            metavar="SIZE",
            help="The target: its parameters such as 70B, or a folder with a config.json.",
            rich_help_panel=_MODELS,
        ),
    ]
    draft: Annotated[
        str | None,
        typer.Option(
            "--draft",
            "--draft-config",
            metavar="SIZE",
            help="The draft model, likewise. Without one, decoding is plain.",
            rich_help_panel=_MODELS,
        ),
    ] = None
    alpha: Annotated[
        str | None,
        typer.Option(
            metavar="X|FILE",
            help="α, the probability that a drafted token is accepted: a number, or what outrider "
            "bench measured (its folder or cells.jsonl). Default: 0.7, an assumption.",
            rich_help_panel=_MODELS,
        ),
    ] = None
    bits: Annotated[
        float,
        typer.Option(metavar="N", help="Bits per weight.", rich_help_panel=_MODELS),
    ] = 16.0
    draft_bits: Annotated[
        float | None,
        typer.Option(
            metavar="N",
            help="Bits per weight of the draft. Default: --bits.",
            rich_help_panel=_MODELS,
        ),
    ] = None
    kv_bits: Annotated[
        float,
        typer.Option(metavar="N", help="Bits per number in the KV cache.", rich_help_panel=_MODELS),
    ] = 16.0
    passes: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Times of passes as outrider profile --json measured them, in place of a "
            "computation from the hardware's numbers; for one GPU per replica.",
            rich_help_panel=_MODELS,
        ),
    ] = None


@dataclass(frozen=True)
class Hardware:
    """The GPUs."""

    gpus: Annotated[
        int, typer.Option(metavar="N", min=1, help="Number of GPUs.", rich_help_panel=_HARDWARE)
    ] = 8
    gpu: Annotated[str, _gpu_number("A known GPU, or any name with numbers.", "NAME")] = "h100"
    gpus_per_server: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Most GPUs that share a model by tensor parallelism.",
            rich_help_panel=_HARDWARE,
        ),
    ] = 8
    memory: Annotated[float | None, _gpu_number("Memory of a GPU in GB.")] = None
    bandwidth: Annotated[float | None, _gpu_number("Its bandwidth in GB/s.")] = None
    tflops: Annotated[float | None, _gpu_number("Its operations in TFLOP/s.")] = None
    link_bandwidth: Annotated[
        float | None, _gpu_number("Bandwidth to the server's other GPUs in GB/s, per direction.")
    ] = None
    link_latency: Annotated[
        float | None, _gpu_number("Time of one step of a collective operation in µs.")
    ] = None
    bandwidth_reached: Annotated[
        float | None, _gpu_number("Share of the bandwidth that passes reach. Default: 0.8.")
    ] = None
    flops_reached: Annotated[
        float | None, _gpu_number("Share of the operations that passes reach. Default: 0.6.")
    ] = None
    layer_time: Annotated[
        float | None, _gpu_number("Time per layer beyond that in µs. Default: 5.")
    ] = None


@dataclass(frozen=True)
class Demand:
    """What is asked."""

    load: Annotated[
        str,
        typer.Option(
            metavar="RATE",
            help="Requests per second such as 50rps, or per minute such as 3000rpm.",
            rich_help_panel=_LOAD,
        ),
    ]
    prompt_tokens: Annotated[
        int, typer.Option(metavar="N", help="Length of the prompts.", rich_help_panel=_LOAD)
    ] = 512
    output_tokens: Annotated[
        int,
        typer.Option(metavar="N", help="Mean length of the outputs.", rich_help_panel=_LOAD),
    ] = 256
    max_gamma: Annotated[
        int,
        typer.Option(metavar="N", min=0, help="Longest draft considered.", rich_help_panel=_LOAD),
    ] = 8
    max_batch: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Most requests that run together, also where more fit into memory.",
            rich_help_panel=_LOAD,
        ),
    ] = 256
    max_per_token: Annotated[
        float | None,
        typer.Option(
            metavar="SECONDS",
            help="Only consider plans with at most this mean time per output token.",
            rich_help_panel=_LOAD,
        ),
    ] = None


@dataclass(frozen=True)
class Simulation:
    """How the plan is simulated."""

    simulate: Annotated[
        float,
        typer.Option(
            metavar="HOURS",
            min=0,
            help="Also simulate the plan, and plain decoding, for this long.",
            rich_help_panel=_SIMULATION,
        ),
    ] = 0.0
    swing: Annotated[
        float,
        typer.Option(
            metavar="X",
            help="How far the load goes above and below its mean over a day, as a share of it.",
            rich_help_panel=_SIMULATION,
        ),
    ] = 0.0
    mean_hours_to_failure: Annotated[
        float | None,
        typer.Option(
            metavar="HOURS",
            help="Mean time between failures of a replica. Default: none fails.",
            rich_help_panel=_SIMULATION,
        ),
    ] = None
    repair_minutes: Annotated[
        float,
        typer.Option(
            metavar="MINUTES",
            min=0,
            help="Time from a failure until the replica serves again.",
            rich_help_panel=_SIMULATION,
        ),
    ] = 5.0
    seed: Annotated[
        int, typer.Option(metavar="N", help="Of the simulation.", rich_help_panel=_SIMULATION)
    ] = 0

"""``outrider tree-plan``: finds the fastest token tree for a pair of models."""

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.console import Console

from outrider.cli.engines import open_engine, require_decoder_only, require_draft
from outrider.cli.errors import fail
from outrider.cli.options.models import Models
from outrider.cli.options.output import OUTPUT, AsJson
from outrider.cli.options.sampling import Seed, Truncation
from outrider.cli.options.speculation import Speculation
from outrider.cli.progress import Progress
from outrider.cli.prompt import read_prompts
from outrider.cli.start import start

if TYPE_CHECKING:
    from outrider.lab.tree_plan import PairPlan

PROMPTS = (
    "def read_lines(path):\n    ",
    "class Stack:\n    def __init__(self",
    "import argparse\n\n\ndef main():\n",
    "try:\n    import numpy as np\nexcept ImportError:\n    ",
)
_TREE = "Tree"


def tree_plan(
    file: Annotated[
        Path | None,
        typer.Option(
            "--file",
            "-f",
            metavar="FILE",
            help="Prompts to measure on: one per line, or JSON lines with a 'prompt' if FILE ends "
            "in .jsonl. Default: a few short Python prompts.",
        ),
    ] = None,
    *,
    models: Models,
    truncation: Truncation,
    seed: Seed = 0,
    num_nodes: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=2,
            max=256,
            help="Maximum number of nodes, including the root.",
            rich_help_panel=_TREE,
        ),
    ] = 64,
    depth: Annotated[
        int,
        typer.Option(
            metavar="N", min=1, max=64, help="Maximum number of levels.", rich_help_panel=_TREE
        ),
    ] = 8,
    width: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            max=255,
            help="Maximum number of children per node: the ranks whose acceptance is measured.",
            rich_help_panel=_TREE,
        ),
    ] = 16,
    rounds: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=1,
            help="Rounds per prompt over which acceptance is measured.",
            rich_help_panel=_TREE,
        ),
    ] = 48,
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            metavar="FILE",
            help="Write the tree to this topology file.",
            rich_help_panel=OUTPUT,
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Find the fastest token tree for your own models and hardware.

    Measures how often the target accepts the draft model's b-th draw at a position, times forward
    passes of both models, and finds the tree with the fewest seconds per token (Sequoia's dynamic
    programme). Takes seconds on the embedded pair:

      outrider tree-plan --output tree.json
      outrider generate "def main():" --method sequoia -o topology=tree.json

    The times are those of the forward passes alone, at batch size 1.
    """
    require_draft(models, "tree-plan")
    prompts = list(PROMPTS) if file is None else read_prompts(file)
    if output is not None and not output.absolute().parent.is_dir():
        raise fail(f"--output {output}: there is no folder {output.parent}")
    start()
    import torch

    from outrider.drafters.tree.topology import Topology
    from outrider.lab.tree_plan import plan_for_pair
    from outrider.sampling import Sampling

    sampling = Sampling(**vars(truncation), seed=seed)
    engine = open_engine(models, Speculation(num_speculative_tokens=1))
    require_decoder_only(engine, "tree-plan")
    assert engine.draft is not None
    encoded = [list(engine.encode(prompt)) for prompt in prompts]
    with Progress(as_json) as progress, torch.inference_mode():
        plan = plan_for_pair(
            engine.target,
            engine.draft,
            encoded,
            sampling,
            num_nodes=num_nodes,
            depth=depth,
            width=width,
            num_rounds=rounds,
            eos_ids=engine.eos_ids,
            progress=progress.show,
        )
    if output is not None and plan.tree.paths:
        try:
            Topology(plan.tree.paths).write(output)
        except OSError as error:
            raise fail(f"--output {output}: {error.strerror or error}") from error
    if as_json:
        typer.echo(json.dumps(_as_dict(plan)))
    else:
        _print(plan, output)


def _as_dict(plan: "PairPlan") -> dict[str, Any]:
    return {
        "acceptance": plan.acceptance,
        "num_places": plan.num_positions,
        "target_seconds": {str(n): seconds for n, seconds in plan.target_seconds.items()},
        "draft_seconds": plan.draft_seconds,
        "paths": [list(path) for path in plan.tree.paths],
        "plans": _rows(plan),
    }


def _rows(plan: "PairPlan") -> list[dict[str, Any]]:
    plain = plan.target_seconds[1]
    rows = []
    for name, each in (("best chain", plan.chain), ("best tree", plan.tree)):
        seconds = plain if each.seconds is None else each.seconds
        rows.append(
            {
                "name": name,
                "nodes": each.num_nodes,
                "levels": each.depth,
                "tokens_per_round": each.tokens,
                "seconds_per_token": seconds / each.tokens,
                "speedup": plain * each.tokens / seconds,
            }
        )
    return rows


def _print(plan: "PairPlan", output: Path | None) -> None:
    from rich import box
    from rich.table import Table

    console = Console(highlight=False)
    shares = "  ".join(f"{p:.3f}" for p in plan.acceptance[:8])
    more = " …" if len(plan.acceptance) > 8 else ""
    console.print(
        f"Acceptance by rank, at {plan.num_positions} positions: {shares}{more}", markup=False
    )
    times = "  ".join(f"{n}: {1e3 * s:.1f}" for n, s in plan.target_seconds.items())
    console.print(f"Target pass by nodes, ms: {times}", markup=False)
    console.print(f"Draft pass, ms: {1e3 * plan.draft_seconds:.1f}", markup=False)
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in ("expected", "nodes", "levels", "tokens/round", "ms/token", "speed-up"):
        table.add_column(name, justify="left" if name == "expected" else "right", no_wrap=True)
    for row in _rows(plan):
        table.add_row(
            row["name"],
            str(row["nodes"]),
            str(row["levels"]),
            f"{row['tokens_per_round']:.2f}",
            f"{1e3 * row['seconds_per_token']:.2f}",
            f"{row['speedup']:.2f}x",
        )
    console.print(table)
    if not plan.tree.paths:
        console.print("No tree pays off here; plain decoding is faster.", style="bold")
    elif output is not None:
        console.print(
            f"The tree is in {output}; use it with --method sequoia -o topology={output}",
            markup=False,
            soft_wrap=True,
        )

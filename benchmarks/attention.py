"""Attention of few query tokens over the KV buffers of all layers: our kernel and torch's.

    python -m benchmarks.attention [--heads 9 3] [--width 64] [--layers 30] [--tokens 1 5 16]
        [--contexts 300 1024 4096] [--dtypes float32 bfloat16] [--between 4] [--turns 11]

The layers of a model take turns, and before each one so many megabytes of other memory are read as
those of its weights, so that keys and values are in the same cache, or in memory, as in a model. In
every turn, one after the other: our kernel, torch's ``scaled_dot_product_attention`` with the mask
and with keys that heads share, and the sum of as many bytes, about the least time that reading keys
and values takes. With one thread, times are those that the processor spent on this process; with
more they are wall-clock times. Medians over the turns. Writes JSON and Markdown.
"""

import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from benchmarks import page
from outrider.lab.metadata import command_line
from outrider.runtime.attention_metadata import chain_mask
from outrider.runtime.kernels.build import load_kernels
from outrider.runtime.kernels.layers import FEW_QUERIES

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class Shape(NamedTuple):
    """A model's attention.

    Attributes:
        heads: of queries, and of keys and values.
        width: of a head.
        layers: of the model.
        between: megabytes of other memory that are read before each layer.
    """

    heads: tuple[int, int]
    width: int
    layers: int
    between: float


@torch.inference_mode()
def measured(
    shape: Shape, dtype: torch.dtype, tokens: int, context: int, threads: int, turns: int
) -> dict[str, float]:
    """Milliseconds of all layers: ``ours``, ``torch`` and ``reading``."""
    clock = time.process_time if threads == 1 else time.perf_counter
    heads, kv_heads = shape.heads
    keys, values = (
        torch.randn(shape.layers, 1, kv_heads, context, shape.width).to(dtype) for _ in range(2)
    )
    query = torch.randn(1, heads, tokens, shape.width).to(dtype)
    mask = chain_mask(torch.arange(context - tokens, context)[None], context, torch.float32)
    scale, narrow_mask = shape.width**-0.5, mask.to(dtype)
    others = torch.ones(shape.layers, max(1, int(shape.between * 2**20) // 4))
    bytes_read = torch.ones(shape.layers, 2 * keys[0].nbytes // 4)

    def ours(i: int) -> Tensor:
        found: Tensor = torch.ops.outrider.attend(
            query, keys[i], values[i], mask, scale, FEW_QUERIES
        )
        return found

    def torchs(i: int) -> Tensor:
        given = query, keys[i], values[i], narrow_mask
        return scaled_dot_product_attention(*given, scale=scale, enable_gqa=True)

    ways: dict[str, Callable[[int], Tensor]] = {
        "ours": ours,
        "torch": torchs,
        "reading": lambda i: bytes_read[i].sum(),
    }
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(turns + 1):
        for name, way in ways.items():
            total = 0.0
            for i in range(shape.layers):
                others[i].sum()
                began = clock()
                way(i)
                total += clock() - began
            seconds[name].append(total)
    return {name: 1000 * median(found[1:]) for name, found in seconds.items()}


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    (heads, kv_heads), width = about["heads"], about["width"]
    settings = (
        f"{about['layers']} layers of {heads} heads of queries and {kv_heads} of keys and values, "
        f"{width} wide, {about['between']:g} MB read before each; milliseconds of all layers."
    )
    lines = page.header("Attention over KV buffers", about, settings)
    columns = "dtype", "context", "tokens", "ours", "torch", "torch / ours", "reading / ours"
    return "\n".join([*lines, *page.table(columns, map(_row, report["rows"]))]) + "\n"


def _row(row: dict[str, Any]) -> Sequence[object]:
    ours, torchs, reading = (row["milliseconds"][name] for name in ("ours", "torch", "reading"))
    times = f"{ours:.2f}", f"{torchs:.2f}", f"{torchs / ours:.2f}", f"{reading / ours:.2f}"
    return row["dtype"], row["context"], row["tokens"], *times


def main() -> None:
    """Parses the options, measures, and writes the report after each row."""
    parser = page.parser(__doc__, threads=1)
    parser.add_argument("--heads", type=int, nargs=2, default=(9, 3), metavar=("QUERIES", "KEYS"))
    parser.add_argument("--width", type=int, default=64, help="of a head")
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--tokens", type=int, nargs="+", default=[1, 5, 16])
    parser.add_argument("--contexts", type=int, nargs="+", default=[300, 1024, 4096])
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=list(DTYPES))
    parser.add_argument("--between", type=float, default=4, help="megabytes read before a layer")
    parser.add_argument("--turns", type=int, default=11)
    options = parser.parse_args()
    for name in ("heads", "width", "layers", "tokens", "contexts", "turns"):
        asked = getattr(options, name)
        if min(asked if isinstance(asked, Sequence) else [asked]) < 1:
            parser.error(f"--{name}: expected numbers of at least 1, got {asked}")
    if options.between < 0:
        parser.error(f"--between: expected at least 0 megabytes, got {options.between:g}")
    if options.heads[0] % options.heads[1]:
        parser.error(f"--heads {options.heads[0]} {options.heads[1]}: queries share keys equally")
    if min(options.contexts) < max(options.tokens):
        parser.error(
            f"--contexts {min(options.contexts)}: a context holds the {max(options.tokens)} tokens"
        )
    torch.set_num_threads(options.threads)
    load_kernels()
    shape = Shape(tuple(options.heads), options.width, options.layers, options.between)
    about = page.about(command_line(), **shape._asdict())
    rows: list[dict[str, Any]] = []
    for dtype in options.dtypes:
        for context in options.contexts:
            for tokens in options.tokens:
                sizes = DTYPES[dtype], tokens, context
                found = measured(shape, *sizes, options.threads, options.turns)
                row = {"dtype": dtype, "context": context, "tokens": tokens}
                rows.append({**row, "milliseconds": found})
                print(*_row(rows[-1]), flush=True)
                report = {"about": about, "rows": rows}
                page.write(options.out, "attention", report, markdown(report))


if __name__ == "__main__":
    main()

"""The report of ``benchmarks.gpu`` as a page."""

from collections.abc import Iterator
from typing import Any

from benchmarks import page

_HEAD = (
    "draft",
    "acceptance",
    "γ",
    "T",
    "tokens/s",
    "spread",
    "× plain",
    "tokens/round",
    "round ms",
    "of floor",
    "target pass ms",
    "of floor",
    "draft pass ms",
    "of floor",
    "gaps",
    "launches",
    "kernels",
    "waits",
)


def markdown(report: dict[str, Any]) -> str:
    """Tables by target, compile mode and batch size; then waits and notes."""
    about, memory = report["about"], report["memory"]
    library = page.version("transformers", about)
    settings = (
        f"on {about['device']}, CUDA {about['cuda']}, transformers {library}. Memory "
        f"is read at {memory['median'] / 1e9:.0f} GB/s ({memory['lowest'] / 1e9:.0f}–"
        f"{memory['highest'] / 1e9:.0f}). {about['rounds']} rounds, median of {about['repeats']} "
        f"interleaved repeats. Where acceptance is set it is {about['acceptance']} per token; "
        "models have the shapes of published ones, not their weights."
    )
    lines = [
        *page.header("On a GPU", about, settings),
        "",
        "*Of floor*: bytes of weights, keys and values over the bandwidth, as a share of the time "
        "taken. *Gaps*: share of a round in which nothing runs on the device. *Launches*: kernel "
        "launches per round, of which a CUDA graph is one. *Kernels*: those that run per round. "
        "*Waits*: synchronisations of the host with the device per round, one of them for the "
        "engine's clock.",
    ]
    rows = report["rows"]
    for target, mode in dict.fromkeys((row["target"], row["compile"]) for row in rows):
        lines += ["", f"## {target}, compile={mode}"]
        mine = [row for row in rows if (row["target"], row["compile"]) == (target, mode)]
        for batch in dict.fromkeys(row["batch"] for row in mine):
            cells = (_cells(row) for row in mine if row["batch"] == batch)
            lines += ["", f"Batch {batch}", *page.table(_HEAD, cells, left=2)]
    lines += [*_waits(rows)]
    if report["notes"]:
        lines += ["", "## Notes", "", *(f"- {note}" for note in report["notes"])]
    return "\n".join(lines) + "\n"


def _cells(row: dict[str, Any]) -> list[str]:
    first = [row["draft"] or "–", row["kind"], str(row["gamma"] or "–"), f"{row['temperature']:g}"]
    if "failed" in row:
        return [*first, f"failed: {row['failed']}", *[""] * (len(_HEAD) - len(first) - 1)]
    if "passes" not in row:
        speed = f"{row['slowest']:.1f}–{row['fastest']:.1f}"
        ratio = "–" if row["speedup"] is None else f"{row['speedup']:.2f}"
        cells = [*first, f"{row['tokens_per_second']:.1f}", speed, ratio]
        return cells + ["–"] * (len(_HEAD) - len(cells))
    passes, device = row["passes"], row["activity"]
    return [
        *first,
        f"{row['tokens_per_second']:.1f}",
        f"{row['slowest']:.1f}–{row['fastest']:.1f}",
        "–" if row["speedup"] is None else f"{row['speedup']:.2f}",
        f"{row['acceptance_length']:.2f}",
        f"{row['round_ms']:.2f}",
        f"{row['of_floor']:.2f}",
        *_pass(passes.get("target")),
        *_pass(passes.get("draft")),
        "–" if device is None else f"{row['gaps']:.0%}",
        "–" if device is None else f"{device['launches']:.0f}",
        "–" if device is None else f"{device['kernels']:.0f}",
        "–" if device is None else f"{sum(device['waits'].values()):.1f}",
    ]


def _pass(taken: dict[str, float] | None) -> tuple[str, str]:
    if taken is None:
        return "–", "–"
    return f"{taken['ms']:.2f}", f"{taken['of_floor']:.2f}"


def _waits(rows: list[dict[str, Any]]) -> Iterator[str]:
    """Every line of code in which the host waits, with its most waits per round."""
    most: dict[str, float] = {}
    for row in rows:
        for line, count in (row.get("sync_places") or {}).items():
            most[line] = max(count, most.get(line, 0.0))
    if most:
        ordered = sorted(most.items(), key=lambda item: -item[1])
        yield from ("", "## Where the host waits for the device")
        cells = ((line, f"{count:.2f}") for line, count in ordered)
        yield from page.table(("line", "most waits per round"), cells)

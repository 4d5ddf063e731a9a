"""Writes the table of a benchmark into README.md, between two markers.

    python scripts/fill_results.py [--check]

The numbers come from benchmarks/results/vs_transformers.json. ``--check`` writes nothing and fails
if the README differs.
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
BEGIN, END = "<!-- results -->", "<!-- /results -->"


def table(report: dict) -> str:
    """The rows of batch 1 at γ 5 and of the larger batches, as a Markdown table."""
    about, parts = report["about"], report["temperatures"]
    names = (
        "transformers plain",
        "transformers assisted γ=5",
        "outrider plain",
        "outrider speculative γ=5",
        "outrider plain, batch 16",
        "outrider γ=5, batch 16",
    )
    heads = " | ".join(f"temperature {float(t):g}" for t in parts)
    lines = [
        f"Tokens per second, embedded pair, {about['hardware']}, {about['threads']} threads, "
        f"{about['dtype']}, eager, median of {about['repeats']} interleaved repeats "
        f"({about['date']}; `{about['command']}`; "
        f"[full table](benchmarks/results/vs_transformers.md)):",
        "",
        f"| | {heads} |",
        "|---|" + "---:|" * len(parts),
    ]
    for name in names:
        cells = " | ".join(f"{part['rows'][name]['median']:.0f}" for part in parts.values())
        lines.append(f"| {name} | {cells} |")
    for name in next(iter(parts.values()))["ratios"]:
        if "γ=5" in name or "γ" not in name:
            cells = " | ".join(f"{part['ratios'][name]:.2f}×" for part in parts.values())
            lines.append(f"| *{name}* | {cells} |")
    return "\n".join(lines)


def filled(readme: str, report: dict) -> str:
    """The README with the table between its markers."""
    before, rest = readme.split(BEGIN)
    after = rest.split(END, 1)[1] if END in rest else rest
    return f"{before}{BEGIN}\n{table(report)}\n{END}{after}"


def main() -> int:
    """Writes the table, or checks it; returns 1 if the check fails."""
    path = ROOT / "README.md"
    report = json.loads((ROOT / "benchmarks/results/vs_transformers.json").read_text())
    old = path.read_text()
    new = filled(old, report)
    if "--check" in sys.argv:
        if new != old:
            sys.stderr.write("README.md: run `python scripts/fill_results.py`\n")
        return int(new != old)
    path.write_text(new)
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Where a round's time goes on this machine: ``outrider profile`` on one to three pairs.

    python -m benchmarks.profile [--cases 3] [--rounds 32] [--repeats 2] [--out DIR]

The embedded pair eager, then compiled; then the embedded draft with a target inflated to 0.3
billion parameters (``outrider.testing.inflate``: the same function at the cost of a larger model),
far larger than any cache. Holds what is promised against what was measured. Writes JSON, a page
with the tables of the command line, and the β curve of the first pair, anew after each pair.
"""

import argparse
import io
import json
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any, Literal

import torch

import outrider
from benchmarks.vs_transformers import PROMPTS
from outrider import Engine, Sampling
from outrider.bench.frontier import about
from outrider.bench.profile import draw, profile
from outrider.cli.profile_table import show
from outrider.models import HFModel
from outrider.testing.inflate import Shape, inflate

LARGE = Shape(hidden_size=1024, num_layers=24, num_key_value_heads=8, intermediate_size=2816)
OUTSIDE_BAR, FLOOR_BAR, FORMULA_BAR = 0.10, 0.75, 0.92


@dataclass(frozen=True)
class Case:
    """A pair and how it runs."""

    name: str
    compile: Literal["off", "auto"]
    large: bool = False

    def engine(self) -> Engine:
        """The pair, loaded anew: models that are compiled stay so."""
        if not self.large:
            return outrider.load(max_batch_size=1, compile=self.compile)
        engine = outrider.load(max_batch_size=1)
        assert engine.draft is not None
        small = engine.target
        target = HFModel(inflate(small.module, LARGE), small.tokenizer, "inflated target")
        return outrider.load(target, engine.draft, max_batch_size=1, compile=self.compile)


CASES = (
    Case("embedded pair, eager", "off"),
    Case("embedded pair, compiled", "auto"),
    Case("embedded draft, target inflated to 0.3 billion parameters, compiled", "auto", True),
)


def bars(case: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """What is promised, what was measured, and whether it held."""
    outside = case["phases"]["outside_passes"]
    yield (
        f"at most {OUTSIDE_BAR:.0%} of a round outside both models' passes",
        f"{outside:.1%}",
        outside <= OUTSIDE_BAR,
    )
    reached = case["models"]["target"]["floors"]["alone"]["reached"]
    text = f"a target pass over one token reaches {FLOOR_BAR} of its floor"
    yield text, f"{reached:.2f}", reached >= FLOOR_BAR
    for key, name in (("by_alpha", "α"), ("by_tokens", "the measured tokens per round")):
        share = case["speedup"][f"reached_{key}"]
        text = f"the speed-up reaches {FORMULA_BAR} of the formula's with {name}"
        yield text, f"{share:.2f}", share >= FORMULA_BAR


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    lines = ["# Where a round's time goes", "", f"Command: `{report['command']}`"]
    for case in report["cases"]:
        text = io.StringIO()
        show(case, text)
        table = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
        lines += ["", f"## {case['name']}", "", "```", table.strip(), "```", ""]
        lines += ["| bar | measured | met |", "|---|---:|---|"]
        lines += [
            f"| {bar} | {value} | {'yes' if met else 'no'} |" for bar, value, met in bars(case)
        ]
    lines += ["", "## β", "", "![Pass time and β by tokens in the pass](profile.svg)"]
    return "\n".join(lines) + "\n"


def measure(case: Case, rounds: int, repeats: int) -> dict[str, Any]:
    """One profile."""
    print(case.name, flush=True)
    engine = case.engine()
    if case.large:
        rounds, repeats = max(1, rounds // 3), 1
    found = profile(engine, PROMPTS[1], Sampling(), rounds=rounds, repeats=repeats)
    where = about(
        target="inflated" if case.large else "embedded",
        draft="embedded",
        method="speculative",
        dtype=str(engine.target.dtype).removeprefix("torch."),
        device=str(engine.target.device),
        compile=case.compile,
        quantize_draft=None,
        quantize_target=None,
    )
    return {"name": case.name, "about": where, **found.document}


def main() -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--cases", type=int, default=len(CASES), help="only the first so many")
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("benchmarks/results"))
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    report: dict[str, Any] = {
        "date": date.today().isoformat(),
        "command": f"python -m benchmarks.profile --cases {options.cases} --rounds "
        f"{options.rounds} --repeats {options.repeats}",
        "cases": [],
    }
    options.out.mkdir(parents=True, exist_ok=True)
    for case in CASES[: options.cases]:
        report["cases"].append(measure(case, options.rounds, options.repeats))
        (options.out / "profile.json").write_text(json.dumps(report, indent=1) + "\n")
        (options.out / "profile.md").write_text(markdown(report))
        draw(report["cases"][0], options.out / "profile.svg")
    print(markdown(report))


if __name__ == "__main__":
    main()

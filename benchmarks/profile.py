"""Where a round's time goes on this machine: ``outrider profile`` on several pairs.

    python -m benchmarks.profile [--cases eager compiled greedy 0.3B 1B] [--rounds 32] [--repeats 2]

The cases are the embedded pair, eager and compiled (also at temperature 0), and the embedded draft
with a target inflated to 0.3 or 1 billion parameters (``benchmarks.inflate``: the same
function at the cost of a larger model), compiled, which is far larger than any processor cache.
Compares the measurements with bars. The result of a case is kept until it is measured again, so
cases can run one at a time. After each case, writes JSON, a page with the tables of the command
line, and the β curve of one case.
"""

import io
import json
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

import torch

import outrider
from benchmarks import page
from benchmarks.inflate import Shape, inflate
from benchmarks.vs_transformers import PROMPTS
from outrider import Engine, Sampling
from outrider.cli.profile_table import show
from outrider.engine.warming import warm_up
from outrider.lab.metadata import run_metadata
from outrider.lab.profile import draw, profile
from outrider.methods import METHODS
from outrider.runtime import HFModel, load_model
from outrider.runtime.executors.prepare import prepare

OUTSIDE_BARS, FLOOR_BARS = (0.10, 0.05), (0.5, 0.75)  # embedded pair, inflated target
FORMULA_BAR = 0.92


@dataclass(frozen=True)
class Case:
    """A pair with its settings.

    Attributes:
        name: on the page.
        compile: compile mode of both models.
        temperature: of the output.
        shape: of an inflated target; None for the embedded one. A case with an inflated target has
            a third of the rounds, and one repeat.
    """

    name: str
    compile: Literal["off", "auto"]
    temperature: float = 1.0
    shape: Shape | None = None

    def engine(self) -> Engine:
        """The engine of a newly loaded pair, since compiled models stay compiled."""
        if self.shape is None:
            return outrider.load(
                num_speculative_tokens="fixed", max_batch_size=1, compile=self.compile
            )
        small = load_model(outrider.assets.target_path())
        target = HFModel(inflate(small.module, self.shape), small.tokenizer, "inflated target")
        draft = load_model(outrider.assets.draft_path(), role="draft")
        for model in (
            target,
            draft,
        ):  # no other engine uses them, so one copy of the weights suffices
            prepare(model, self.compile, own=True)
        engine = Engine(target, draft, METHODS["speculative"], max_batch_size=1)
        warm_up(engine)
        return engine


CASES = {
    "eager": Case("embedded pair, eager", "off"),
    "compiled": Case("embedded pair, compiled", "auto"),
    "greedy": Case("embedded pair, compiled, temperature 0", "auto", temperature=0.0),
    "0.3B": Case(
        "embedded draft, target inflated to 0.3 billion parameters, compiled",
        "auto",
        shape=Shape(hidden_size=1024, num_layers=24, num_key_value_heads=8, intermediate_size=2816),
    ),
    "1B": Case(
        "embedded draft, target inflated to 0.9 billion parameters, compiled",
        "auto",
        shape=Shape(hidden_size=2048, num_layers=18, num_key_value_heads=8, intermediate_size=7168),
    ),
}


def bars(case: dict[str, Any]) -> Iterator[tuple[str, str, bool]]:
    """Each bar with the measured value, and whether it is met."""
    outside, inflated = case["phases"]["outside_passes"], case["about"]["target"] == "inflated"
    most, least = OUTSIDE_BARS[inflated], FLOOR_BARS[inflated]
    yield (
        f"at most {most:.0%} of a round outside both models' passes",
        f"{outside:.1%}",
        outside <= most,
    )
    alone = case["models"]["target"]["floors"]["alone"]
    num_bytes, bandwidth = alone["weights"] + alone["keys_values"], case["memory"]["median"]
    reached = num_bytes / bandwidth / alone["pass"]
    text = f"a target pass over one token reaches {least} of its floor by the memory's bandwidth"
    yield text, f"{reached:.2f}", reached >= least
    for key, name in (("by_alpha", "α"), ("by_tokens", "the measured tokens per round")):
        share = case["speedup"][f"reached_{key}"]
        text = f"the speed-up reaches {FORMULA_BAR} of the formula's with {name}"
        yield text, f"{share:.2f}", share >= FORMULA_BAR


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    lines = ["# Where a round's time goes"]
    for case in report["cases"]:
        text = io.StringIO()
        show(case, text)
        table = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
        lines += ["", f"## {case['name']}", "", f"Command: `{case['command']}`", ""]
        lines += ["```", table.strip(), "```", *page.bars_table(bars(case))]
    lines += ["", f"## β: {report['cases'][0]['name']}", ""]
    lines += ["![Pass time and β by tokens in the pass](profile.svg)"]
    return "\n".join(lines) + "\n"


def measure(key: str, rounds: int, repeats: int) -> dict[str, Any]:
    """Profiles one case."""
    case = CASES[key]
    engine = case.engine()
    command = f"python -m benchmarks.profile --cases {key} --rounds {rounds} --repeats {repeats}"
    if case.shape is not None:
        rounds, repeats = max(1, rounds // 3), 1
    sampling = Sampling(temperature=case.temperature)
    found = profile(engine, PROMPTS[1], sampling, rounds=rounds, repeats=repeats, progress=print)
    where = run_metadata(
        target="embedded" if case.shape is None else "inflated",
        draft="embedded",
        method="speculative",
        dtype=str(engine.target.dtype).removeprefix("torch."),
        device=str(engine.target.device),
        compile=case.compile,
        quantize_draft=None,
        quantize_target=None,
    )
    return {"name": case.name, "command": command, "about": where, **found.document}


def main() -> None:
    """Parses the options, measures, and writes the report and its page after each case."""
    parser = page.parser(__doc__)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=2)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    file = options.out / "profile.json"
    done = json.loads(file.read_text())["cases"] if file.exists() else []
    found = {case["name"]: case for case in done}
    for key in options.cases:
        print(CASES[key].name, flush=True)
        found[CASES[key].name] = measure(key, options.rounds, options.repeats)
        known = [found[case.name] for case in CASES.values() if case.name in found]
        report = {"cases": known}
        page.write(options.out, "profile", report, markdown(report))
        draw(known[0], options.out / "profile.svg")
        show(found[CASES[key].name], sys.stdout)


if __name__ == "__main__":
    main()

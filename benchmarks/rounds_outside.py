"""Milliseconds per round outside the forward passes: method × sampling, eager and compiled.

    python -m benchmarks.rounds_outside [--methods speculative block …] [--samplings T1 top-p …]
        [--target embedded --draft embedded] [--compile auto off] [--rounds 32] [--repeats 3]

Every method decodes the same prompt with one row. The spans of its rounds are recorded as for
``outrider profile``: the time outside is a round's time less that of the forward passes of target
and draft model, where a fused draft counts as forward passes. The table has the median over the
repeats, and how many times as much it is as speculative sampling's at temperature 1.
Methods of one compile mode share the loaded pair. Each method's row is written once it is measured,
so a run that is interrupted keeps what it has. Writes JSON and Markdown.
"""

from statistics import median
from typing import Any

import torch

import outrider
from benchmarks import page
from benchmarks.memory_rounds import TREE
from benchmarks.vs_transformers import PROMPTS
from outrider import Engine, Sampling
from outrider.core.errors import OutriderError
from outrider.lab.metadata import command_line
from outrider.lab.profile.instrument import recorded
from outrider.lab.profile.phases import Phases
from outrider.lab.profile.rounds import generate_rounds
from outrider.lab.profile.spans import SpanRecorder
from outrider.runtime import HFModel

METHODS: dict[str, dict[str, Any]] = {
    "speculative": {},
    "block": {},
    "mentored": {},
    "lenience": {},
    "sample-match": {},
    "typical": {},
    "relaxed": {},
    "coupled": {},
    "cascade": {},
    "speculative, heuristic lengths": {"draft_length": "heuristic"},
    "speculative, confidence stop": {"draft_confidence": 0.3},
    "prompt-lookup": {},
    "specinfer": {"options": {"topology": TREE}},
    "sequoia": {"options": {"topology": TREE}},
    "top-k-tree": {"options": {"topology": TREE}},
    "traversal": {"options": {"topology": TREE}},
    "spectr": {},
    "dynamic-tree": {"options": {"num_nodes": 16}},
    "mjsd": {},
    "mtad": {},
    "early-exit": {},
    "plain": {},
}
"""Settings of ``outrider.load`` by name; the method's own name precedes the comma."""

SAMPLINGS: dict[str, Sampling] = {
    "T0": Sampling(temperature=0),
    "T1": Sampling(temperature=1),
    "top-p": Sampling(temperature=1, top_p=0.9),
    "top-k": Sampling(temperature=1, top_k=50),
    "min-p": Sampling(temperature=1, min_p=0.05),
    "penalty": Sampling(temperature=1, repetition_penalty=1.1),
}
REFERENCE = "speculative", "T1"
_CANNOT = "-"


def milliseconds(engine: Engine, sampling: Sampling, rounds: int, repeats: int) -> float:
    """The median time per round outside the forward passes."""
    prompt = engine.encode(PROMPTS[1])
    generate_rounds(engine, prompt, sampling, rounds)  # warm-up
    found = []
    for _ in range(repeats):
        recorder = SpanRecorder()
        with recorded(engine, recorder):
            generate_rounds(engine, prompt, sampling, rounds)
        found.append(1000 * Phases.of(recorder.spans).outside)
    return median(found)


def row(
    name: str,
    pair: tuple[HFModel, HFModel],
    samplings: list[str],
    rounds: int,
    repeats: int,
) -> dict[str, float | None]:
    """One method's times by sampling; None where it does not decode with these parameters."""
    target, draft = pair
    method = name.split(",")[0]
    settings = {"max_batch_size": 1, "measure": False} | METHODS[name]
    used = draft if outrider.METHODS[method].needs_draft else None
    engine = outrider.load(target, used, method, "fixed", **settings)  # compiled if the models are
    found: dict[str, float | None] = {}
    for each in samplings:
        try:
            found[each] = milliseconds(engine, SAMPLINGS[each], rounds, repeats)
        except OutriderError:
            found[each] = None
    return found


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about, tables = report["about"], report["milliseconds"]
    models = f"{about['target']} target, {about['draft']} draft."
    lines = page.header("Time per round outside the forward passes", about, models)
    for mode, rows in tables.items():
        reference = rows.get(REFERENCE[0], {}).get(REFERENCE[1])
        samplings = list(dict.fromkeys(each for times in rows.values() for each in times))
        lines += ["", f"## compile={mode}", "", "Milliseconds per round; in parentheses, the ratio"]
        lines[-1] += f" to `{REFERENCE[0]}` at {REFERENCE[1]}."
        lines += page.table(
            ("method", *samplings),
            (
                (name, *(_cell(times.get(each), reference) for each in samplings))
                for name, times in rows.items()
            ),
        )
    return "\n".join(lines) + "\n"


def _cell(time: float | None, reference: float | None) -> str:
    if time is None:
        return _CANNOT
    return f"{time:.2f}" if not reference else f"{time:.2f} ({time / reference:.2f})"


def main() -> None:
    """Parses the options, measures, and writes the report after each method."""
    parser = page.parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument("--compile", nargs="+", choices=("off", "auto"), default=["off", "auto"])
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default="embedded")
    parser.add_argument("--rounds", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tables: dict[str, dict[str, Any]] = {}
    for mode in options.compile:
        load = outrider.load(options.target, options.draft, compile=mode)
        assert load.draft is not None
        for name in options.methods:
            tables.setdefault(mode, {})[name] = row(
                name,
                (load.target, load.draft),
                options.samplings,
                options.rounds,
                options.repeats,
            )
            print(mode, name, tables[mode][name], flush=True)
            about = page.about(command_line(), target=options.target, draft=options.draft)
            report = {"about": about, "milliseconds": tables}
            page.write(options.out, "rounds_outside", report, markdown(report))


if __name__ == "__main__":
    main()

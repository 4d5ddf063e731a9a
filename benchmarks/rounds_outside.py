"""Milliseconds per round outside the forward passes: method × sampling, eager and compiled.

    python -m benchmarks.rounds_outside [--methods speculative block …] [--samplings T1 top-p …]
        [--target embedded --draft embedded] [--compile auto off] [--rounds 32] [--turns 5]

Every method decodes the same prompt with one row. The spans of its rounds are recorded as for
``outrider profile``: the time outside is a round's time less that of the forward passes of target
and draft model, where a fused draft counts as forward passes. The methods take turns, since the
speed of a machine changes by more than they differ by. The table has the median over the turns, and
how many times as much it is as speculative sampling's at temperature 1. Methods of one compile mode
share the loaded pair. The table is written after each turn, so a run that is interrupted keeps what
it has. Writes JSON and Markdown.
"""

from collections.abc import Iterator, Mapping, Sequence
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


def milliseconds(engine: Engine, sampling: Sampling, rounds: int) -> float | None:
    """The mean time per round outside the forward passes; None where the method does not decode
    with these parameters."""
    recorder = SpanRecorder()
    try:
        prompt = engine.encode(PROMPTS[1])
        with recorded(engine, recorder):
            generate_rounds(engine, prompt, sampling, rounds)
    except OutriderError:
        return None
    return 1000 * Phases.of(recorder.spans).outside


def engine_of(name: str, target: HFModel, draft: HFModel) -> Engine:
    """The engine of a row, which is compiled if the models are."""
    method = name.split(",")[0]
    settings = {"max_batch_size": 1, "measure": False} | METHODS[name]
    used = draft if outrider.METHODS[method].needs_draft else None
    return outrider.load(target, used, method, "fixed", **settings)


def in_turns(
    engines: Mapping[str, Engine], samplings: Sequence[str], rounds: int, turns: int
) -> Iterator[dict[str, dict[str, float | None]]]:
    """The medians of each method by sampling, over the turns so far. The first turn warms up and is
    left out."""
    found: dict[tuple[str, str], list[float | None]] = {}
    for turn in range(turns + 1):
        for name, engine in engines.items():
            for each in samplings:
                time = milliseconds(engine, SAMPLINGS[each], rounds)
                if turn:
                    found.setdefault((name, each), []).append(time)
        if turn:
            yield {
                name: {each: _median(found[name, each]) for each in samplings} for name in engines
            }


def _median(times: Sequence[float | None]) -> float | None:
    known = [time for time in times if time is not None]
    return median(known) if known else None


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
    """Parses the options, measures, and writes the report after each turn."""
    parser = page.parser(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=list(METHODS))
    parser.add_argument("--samplings", nargs="+", choices=SAMPLINGS, default=list(SAMPLINGS))
    parser.add_argument("--compile", nargs="+", choices=("off", "auto"), default=["off", "auto"])
    parser.add_argument("--target", default="embedded")
    parser.add_argument("--draft", default="embedded")
    parser.add_argument("--rounds", type=int, default=32, help="of each method in each turn")
    parser.add_argument("--turns", type=int, default=5)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    tables: dict[str, dict[str, Any]] = {}
    for mode in options.compile:
        pair = outrider.load(options.target, options.draft, compile=mode)
        assert pair.draft is not None
        engines = {name: engine_of(name, pair.target, pair.draft) for name in options.methods}
        for tables[mode] in in_turns(engines, options.samplings, options.rounds, options.turns):
            print(mode, tables[mode], flush=True)
            about = page.about(command_line(), target=options.target, draft=options.draft)
            report = {"about": about, "milliseconds": tables}
            page.write(options.out, "rounds_outside", report, markdown(report))


if __name__ == "__main__":
    main()

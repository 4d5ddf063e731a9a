"""Time to first token, with prompts prefilled by the compiled graph and without it.

    python -m benchmarks.first_token [--tokens 5 10 24 48 100 128 300 513] [--repeats 25]

The embedded pair, compiled, γ 5, temperature 0: wall-clock time of the prefill of both models and
one round. Both modes alternate.
Writes JSON and Markdown.
"""

import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch

import outrider
from benchmarks import page
from outrider import Engine, Sampling
from outrider.runtime import runner

MODES = ("eager", "graph")
ONE = Sampling(temperature=0, max_new_tokens=1, ignore_eos=True)


@contextmanager
def eagerly() -> Iterator[None]:
    """Turns prefill by the compiled graph off."""
    with patch.object(runner, "compiled_prefill_pays", lambda *_: False):
        yield


def measure(engine: Engine, num_tokens: int, repeats: int) -> dict[str, Any]:
    """Milliseconds to the first token by mode: median, lowest and highest."""
    vocabulary = engine.target.num_tokens
    times: dict[str, list[float]] = {mode: [] for mode in MODES}
    for repeat in range(repeats + 1):
        prompt = [[(37 * i + repeat) % (vocabulary - 10) + 10 for i in range(num_tokens)]]
        for mode in MODES:
            began = time.perf_counter()
            if mode == "graph":
                engine.generate(prompt, ONE)
            else:
                with eagerly():
                    engine.generate(prompt, ONE)
            if repeat:  # the first is warm-up
                times[mode].append(1e3 * (time.perf_counter() - began))
    modes = {mode: [statistics.median(ms), min(ms), max(ms)] for mode, ms in times.items()}
    return {"tokens": num_tokens, **modes}


def markdown(report: dict[str, Any]) -> str:
    """The report as a page."""
    about = report["about"]
    settings = (
        "γ 5, temperature 0, prefill of both models and one round; median of "
        f"{about['repeats']} (lowest to highest), both modes alternating."
    )
    rows = [
        (
            row["tokens"],
            *("{:.1f} ({:.1f}–{:.1f})".format(*row[mode]) for mode in MODES),
            f"{row['eager'][0] / row['graph'][0]:.2f}×",
        )
        for row in report["rows"]
    ]
    heads = ("tokens of the prompt", "eager, ms", "graph, ms", "eager ÷ graph")
    lines = page.header("First token, embedded pair, compiled", about, settings)
    return "\n".join(lines + page.table(heads, rows, left=0)) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Parses the options, measures, writes the report and prints the page."""
    parser = page.parser(__doc__)
    parser.add_argument(
        "--tokens", type=int, nargs="+", default=[5, 10, 24, 48, 100, 128, 300, 513]
    )
    parser.add_argument("--repeats", type=int, default=25)
    options = parser.parse_args(arguments)
    torch.set_num_threads(options.threads)
    engine = outrider.load(compile="auto", num_speculative_tokens=5)
    if max(options.tokens) > engine.prompt_limit or min(options.tokens) < 1:
        parser.error(f"--tokens: prompts have 1 to {engine.prompt_limit} tokens")
    if options.repeats < 1:
        parser.error(f"--repeats {options.repeats}: must be 1 or more")
    listed = " ".join(map(str, options.tokens))
    report = {
        "about": page.about(
            f"python -m benchmarks.first_token --tokens {listed} --repeats {options.repeats} "
            f"--threads {options.threads}",
            repeats=options.repeats,
        ),
        "rows": [measure(engine, num, options.repeats) for num in options.tokens],
    }
    page.publish(options.out, "first_token", report, markdown(report))


if __name__ == "__main__":
    main()

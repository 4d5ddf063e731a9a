"""How many rounds the governor takes to follow a change: the step responses of
``benchmarks.governor``.

The draft's weights are exchanged for useless ones, and back, while a row is decoded, greedily and
at temperature 0.8, several times; and a batch grows from 2 rows to the largest and shrinks again.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.governor_cases import NOISE, drafting_module, noisy, prompts_of
from outrider import Engine, Sampling
from outrider.engine import Row, Scheduler
from outrider.runtime.weights import plain_weights, staged

WITHIN = 20
"""Rounds within which the governor is to follow."""

_TEMPERATURES = (0.0, 0.8)
_WINDOW, _MOST_OTHERS = 8, 2  # a change is followed where so many rounds have at most 2 exceptions


def steps(engine: Engine, options: argparse.Namespace) -> dict[str, Any]:
    """Mean draft lengths by round, and the rounds until each change was followed.

    Args:
        engine: a governed one, which nobody else uses.
        options: the rounds between two changes, the repeats, and the batch sizes.
    """
    rounds: int = options.step_rounds
    found: dict[str, Any] = {"rounds": rounds, "plots": {}, "delays": {}}
    for temperature in _TEMPERATURES:
        name = f"draft, temperature {temperature:g}"
        runs = [
            _draft_steps(engine, rounds, temperature, seed) for seed in range(options.step_repeats)
        ]
        found["plots"][name] = runs[-1]
        found["delays"][name] = {
            "useless": [delay(run[rounds : 2 * rounds], False) for run in runs],
            "good again": [delay(run[2 * rounds :], True) for run in runs],
        }
    found["plots"]["batch"] = _batch_steps(engine, rounds, max(options.batches))
    return found


def summary(found: dict[str, Any]) -> list[str]:
    """A line for each change: how many rounds it took."""
    return [
        f"{name}, {change}: followed after {_rounds(delays)} rounds (median and all of "
        f"{len(delays)}), within {WITHIN} in {sum(n is not None and n <= WITHIN for n in delays)}"
        for name, changes in found["delays"].items()
        for change, delays in changes.items()
    ]


def _rounds(delays: Sequence[int | None]) -> str:
    known = [float("inf") if n is None else n for n in delays]
    each = ", ".join("never" if n is None else str(n) for n in delays)
    return f"{median(known):g} ({each})"


def _draft_steps(engine: Engine, rounds: int, temperature: float, seed: int) -> list[float]:
    module = drafting_module(engine)
    weights = plain_weights(module)
    good, useless = staged(module, weights), staged(module, noisy(weights, NOISE["useless"]))
    sampling = Sampling(
        temperature=temperature, max_new_tokens=64 * rounds, ignore_eos=True, seed=seed
    )
    scheduler = engine.new_scheduler()
    for prompt in prompts_of("code", 1, engine.target.num_tokens):
        scheduler.add(engine.request(prompt, sampling))
    asked = Asked()
    found = asked.lengths(scheduler, rounds)
    useless.write()
    found += asked.lengths(scheduler, rounds)
    good.write()
    return found + asked.lengths(scheduler, rounds)


def _batch_steps(engine: Engine, rounds: int, num_rows: int) -> list[float]:
    long = Sampling(temperature=0, max_new_tokens=64 * rounds, ignore_eos=True)
    short = Sampling(temperature=0, max_new_tokens=rounds, ignore_eos=True)
    scheduler = engine.new_scheduler()
    for prompt in prompts_of("code", 2, engine.target.num_tokens):
        scheduler.add(engine.request(prompt, long))
    asked = Asked()
    found = asked.lengths(scheduler, rounds)
    for prompt in prompts_of("code", num_rows - 2, engine.target.num_tokens):
        scheduler.add(engine.request(prompt, short))
    return found + asked.lengths(scheduler, 2 * rounds)


def delay(lengths: Sequence[float], drafts: bool) -> int | None:
    """Rounds after a change until nearly all of the next ones draft, or do not; None if they never
    do.

    Args:
        lengths: draft lengths of the rounds after the change.
        drafts: whether they are to draft.
    """
    follows = [(length > 0) == drafts for length in lengths]
    for start in range(len(follows) - _WINDOW + 1):
        window = follows[start : start + _WINDOW]
        if window[0] and window.count(False) <= _MOST_OTHERS:
            return start
    return None


class Asked:
    """Reads from the statistics of running rows what each round was asked to draft."""

    def __init__(self) -> None:
        self._before: dict[Row, int] = {}

    def lengths(self, scheduler: Scheduler, rounds: int) -> list[float]:
        """The mean draft length in each of the next rounds."""
        found: list[float] = []
        while len(found) < rounds and (scheduler.num_running or scheduler.num_waiting):
            rows = [each.row for each in scheduler.step() if not each.row.over]
            now = {row: _asked(row.stats.draft_lengths) for row in rows}
            grown = [total - self._before.get(row, 0) for row, total in now.items()]
            self._before = now
            if grown:
                found.append(sum(grown) / len(grown))
        return found


def _asked(histogram: Sequence[int]) -> int:
    return sum(length * count for length, count in enumerate(histogram))


def draw_steps(found: dict[str, Any], response: Path) -> None:
    """Draws the draft lengths; the rounds within which a change is to be followed are shaded."""
    import matplotlib as mpl
    from matplotlib.figure import Figure

    from outrider.lab.plots import BLUE

    rounds = found["rounds"]
    with mpl.rc_context({"svg.hashsalt": "outrider", "svg.fonttype": "none", "font.size": 9}):
        figure = Figure(figsize=(6.4, 5.6), layout="constrained")
        panels = figure.subplots(len(found["plots"]), 1)
        for axes, (name, lengths) in zip(panels, found["plots"].items(), strict=True):
            axes.step(range(len(lengths)), lengths, where="post", color=BLUE)
            for change in range(rounds, len(lengths), rounds):
                axes.axvspan(change, change + WITHIN, alpha=0.15, color=BLUE, linewidth=0)
            axes.set_ylim(-0.2, max(1, *lengths) + 0.2)
            axes.set_ylabel("draft length")
            axes.set_title(name)
        panels[-1].set_xlabel(f"round; something changes every {rounds} rounds")
        figure.savefig(response, metadata={"Date": None, "Creator": "benchmarks.governor"})

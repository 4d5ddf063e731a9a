"""Liu, Hu, Bailis, Cheung, Deng, Stoica and Zhang, "Online Speculative Decoding", ICML 2024: α
rises on a stream of requests after its domain has changed.

https://arxiv.org/abs/2310.07177
"""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

from recipes import online_shift
from recipes.reproduce.effect import Values, greater, mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.recipe import Figure, Findings, Recipe, Table


def measure(lab: Lab) -> Findings:
    """The recipe ``recipes.online_shift``: the same stream through three engines."""
    lab.require_full("it trains drafts for minutes")
    out = lab.folder / "online-shift"
    command = [sys.executable, "-m", "recipes.online_shift", "--out", str(out)]
    if lab.subject.target != "embedded":
        command += ["--target", lab.subject.target, "--draft", lab.draft]
    if not (out / "table.json").exists():
        subprocess.run(command, check=True)
    arms = {arm: _alphas((out / f"{arm}.jsonl").read_text()) for arm in online_shift.ARMS}
    return evaluate(arms, json.loads((out / "table.json").read_text()))


def evaluate(arms: dict[str, list[float]], table: dict[str, Any]) -> Findings:
    """Effects of the second half of the bursts after the change.

    Args:
        arms: α by burst of each arm.
        table: as the recipe writes it.
    """
    start = online_shift.BURSTS_BEFORE + online_shift.BURSTS_AFTER // 2
    late = {arm: _values(alphas[start:]) for arm, alphas in arms.items()}
    effects = [
        greater(
            "after the change the adapted draft's α exceeds the frozen one's",
            late["online"],
            late["frozen"],
        ),
        greater(
            "the draft distilled beforehand shows that there was something to learn",
            late["oracle"],
            late["frozen"],
        ),
    ]
    rows = [
        [
            arm,
            f"{sum(alphas[: online_shift.BURSTS_BEFORE]) / online_shift.BURSTS_BEFORE:.3f}",
            f"{mean(late[arm]):.3f}",
        ]
        for arm, alphas in arms.items()
    ]
    figure = Figure(
        "α by burst", "burst", "α", {arm: list(enumerate(a, 1)) for arm, a in arms.items()}
    )
    notes = [
        f"Share of the gap that online training closes: {float(table['recovered']):.0%}.",
        f"Outputs are counted by bursts of {online_shift.BURST} requests of "
        f"{online_shift.NEW_TOKENS} tokens, {online_shift.BURSTS_BEFORE} before the change and "
        f"{online_shift.BURSTS_AFTER} after it, whatever the size below; α is a count, and no time "
        "enters it.",
    ]
    head = ["draft", "α before the change", "α in the second half after it"]
    return Findings(effects, [Table("α by arm", head, rows)], [figure], notes)


def _alphas(text: str) -> list[float]:
    return [json.loads(line)["alpha"] for line in text.splitlines()]


def _values(alphas: list[float]) -> Values:
    return {(0, index, 0): each for index, each in enumerate(alphas)}


RECIPE = Recipe(
    "online-shift",
    "Online adaptation of the draft",
    "Liu et al. (OSD), ICML 2024",
    "α rises on a stream after its domain has changed.",
    measure,
)

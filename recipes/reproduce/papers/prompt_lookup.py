"""Saxena, "Prompt Lookup Decoding", 2023: gains where outputs repeat their prompts.

https://github.com/apoorvumang/prompt-lookup-decoding
"""

from __future__ import annotations

from recipes.reproduce.effect import exceeds, greater, mean
from recipes.reproduce.lab import Lab
from recipes.reproduce.outputs import tokens_per_round, values
from recipes.reproduce.recipe import Findings, Recipe, Table
from recipes.reproduce.subject import Kind

GAMMA = 10
KINDS: tuple[Kind, ...] = ("copy", "free")


def measure(lab: Lab) -> Findings:
    """Prompt lookup on prompts that outputs repeat, and on prose; greedy."""
    rows, per_round, effects = [], {}, []
    for kind in KINDS:
        cells = lab.bench("prompt-lookup", data=kind, gammas=[GAMMA], temperatures=[0.0])
        found, plain = cells.one("prompt-lookup"), cells.one("plain")
        per_round[kind] = values(found, tokens_per_round)
        speeds = lab.speed(found, 0, 0), lab.speed(plain, 0, 0)
        if kind == "copy":
            effects.append(greater("copy-heavy prompts: faster than plain decoding", *speeds))
        rows.append(
            [
                kind,
                f"{mean(per_round[kind]):.2f}",
                f"{found.speed['acceptance_rate']:.2f}",
                f"{mean(speeds[0]) / mean(speeds[1]):.2f}×",
            ]
        )
    effects.append(
        exceeds(
            "more tokens per round on copy-heavy prompts than on prose",
            per_round["copy"],
            per_round["free"],
            expected="greedy outputs of the embedded target repeat themselves on any prompt",
        )
    )
    head = ["prompts", "tokens per round", "acceptance rate", "speed-up"]
    notes = []
    if lab.subject.target == "embedded":
        notes.append(
            "The embedded target is too small to repeat its prompt on its own, so that the outputs "
            "on copy-heavy prompts are forced to be the references: what a model gains that copies."
        )
    return Findings(effects, [Table(f"Greedy, up to {GAMMA} tokens", head, rows)], notes=notes)


RECIPE = Recipe(
    "prompt-lookup",
    "Prompt lookup on copy-heavy and on free text",
    "Saxena, 2023",
    "2.4× on summaries and questions about a context; little on first answers of a conversation.",
    measure,
)

"""Tokens per second of a configuration, predicted from measured acceptance and measured times.

In a steady state, with all rows running and every draft γ tokens long,

    tokens per second = b (1 + S_1 + … + S_γ) / T(b, γ, γ + 1)

:func:`steady_speed` is that formula. It leaves out what whole outputs show: prefill, drafts that
are cut at the end of an output, rows that end early while the others go on, and sources that often
draft less than γ tokens, so that the width of a pass is that of the row with the longest draft.
:func:`predicted_speed` therefore simulates the batches that will be run: it draws the rounds of
every row from those that were measured on its prompt, and adds up the times of rounds.

Legend: S draws, B rows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from outrider.lab.tune.acceptance import Acceptance, tokens_per_round
from outrider.lab.tune.machine import RowRound

Array = NDArray[np.float64]

DRAWS = 12
NOTHING_DRAFTED = Acceptance({0: [RowRound(0, 0)]})
"""The acceptance of plain decoding."""


@dataclass(frozen=True)
class RoundTimes:
    """The time of a round of one source at one draft length.

    Attributes:
        target: seconds of the target's pass by rows and width.
        rest: seconds of all else, by rows.
        outside: seconds of a batch outside of its rounds, by its rows: prefill, and what is done
            after the last round.
    """

    target: Callable[[int, int], float]
    rest: Callable[[int], float]
    outside: Callable[[int], float] = lambda rows: 0.0


def steady_speed(survival: Sequence[float], num_rows: int, times: RoundTimes) -> float:
    """Tokens per second while all rows run and all drafts have full length.

    Args:
        survival: S_1 … S_γ.
        num_rows: b.
        times: of a round with that γ.
    """
    seconds = times.target(num_rows, len(survival) + 1) + times.rest(num_rows)
    return num_rows * tokens_per_round(survival) / seconds


def predicted_speed(
    acceptance: Acceptance,
    length: int,
    times: RoundTimes,
    batches: Sequence[Sequence[int]],
    output_tokens: Mapping[int, int],
    *,
    draws: int = DRAWS,
    seed: int = 0,
) -> float:
    """Tokens per second over whole outputs.

    Args:
        acceptance: the measured rounds.
        length: γ.
        times: of its rounds.
        batches: the prompts of each batch that is to run.
        output_tokens: length of each prompt's output.
        draws: S, how often each batch is simulated.
        seed: of the simulation.
    """
    generator = np.random.default_rng(seed)
    acceptance = acceptance.with_drafts_of(length)
    pooled = acceptance.all_rounds
    tokens = seconds = 0.0
    for prompts in batches:
        rows = [acceptance.rounds.get(prompt) or pooled for prompt in prompts]
        left = [output_tokens[prompt] for prompt in prompts]
        seconds += float(_seconds_S(rows, left, length, times, draws, generator).mean())
        tokens += sum(left)
    return tokens / seconds


def _seconds_S(
    rows: Sequence[Sequence[RowRound]],
    left: Sequence[int],
    length: int,
    times: RoundTimes,
    draws: int,
    generator: np.random.Generator,
) -> Array:
    """Seconds of a batch in each of the draws.

    Args:
        rows: of each row, the rounds to draw from.
        left: tokens of each row's output.
    """
    B, longest = len(rows), max(len(each) for each in rows)
    target, rest = _tables(B, length, times)
    size_B = np.array([len(each) for each in rows])
    drafted_BL, accepted_BL = (np.zeros((B, longest), dtype=np.int64) for _ in range(2))
    for row, rounds in enumerate(rows):
        drafted_BL[row, : len(rounds)] = [min(each.drafted, length) for each in rounds]
        accepted_BL[row, : len(rounds)] = [min(each.accepted, length) for each in rounds]
    left_SB = np.tile(np.array(left, dtype=np.int64), (draws, 1))
    seconds_S = np.full(draws, times.outside(B))
    index_B = np.arange(B)
    while (active_SB := left_SB > 0).any():
        chosen_SB = (generator.random((draws, B)) * size_B).astype(np.int64)
        room_SB = np.maximum(left_SB - 1, 0)
        drafted_SB = np.minimum(drafted_BL[index_B, chosen_SB], room_SB)
        accepted_SB = np.minimum(accepted_BL[index_B, chosen_SB], drafted_SB)
        running_S = active_SB.sum(1)
        width_S = np.where(active_SB, drafted_SB, 0).max(1) + 1
        seconds_S += np.where(running_S > 0, target[running_S, width_S] + rest[running_S], 0.0)
        left_SB -= np.where(active_SB, accepted_SB + 1, 0)
    return seconds_S


def _tables(B: int, length: int, times: RoundTimes) -> tuple[Array, Array]:
    """Seconds of a target pass by rows (0 to B) and width (0 to γ + 1), and of all else by rows."""
    target = np.zeros((B + 1, length + 2))
    rest = np.zeros(B + 1)
    for num_rows in range(1, B + 1):
        rest[num_rows] = times.rest(num_rows)
        for width in range(1, length + 2):
            target[num_rows, width] = times.target(num_rows, width)
    return target, rest

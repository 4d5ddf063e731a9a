"""Requests arrive, end and are aborted while a governor chooses at random: drafts of all lengths,
none, reviews, prompts that the draft model reads late. Greedy outputs equal plain decoding's, and
no step fails. The scheduler recovers from a step that fails, with right outputs and a warning,
which pytest's settings (``filterwarnings`` in pyproject.toml) turn into an error.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, tiny, token_ids
from tiny_recurrent import tiny_recurrent
from tiny_seq2seq import tiny_seq2seq

from outrider.engine.governor.governor import Governor
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.row_memory import RowMemory
from outrider.runtime import HFModel

DTYPE = torch.float64
TARGET = tiny(dtype=DTYPE, std=0.2)
DRAFT = tiny(dtype=DTYPE, std=0.19)
NUM_REQUESTS = 20
AUTO: Any = "auto"

METHODS = ["block", "hybrid", "staged", "top-k-tree", "specinfer", "eagle3"]


class RandomGovernor:
    """Chooses at random, mostly the same for some rounds."""

    def __init__(self, chance: random.Random, governor: Governor) -> None:
        self._chance = chance
        self._governor = governor
        self._share = 0.0  # of rounds that draft

    def ask(
        self, rows: list[RowMemory], limits: Sequence[int], greedy: bool, reviewable: int = 0
    ) -> Asked:
        chance = self._chance
        if chance.random() < 0.1:
            self._share = chance.choice([0.0, 0.0, 0.3, 1.0])
        length = chance.randint(1, 5) if chance.random() < self._share else 0
        length = min(length, max(limits))
        reviews = not length and reviewable > 0 and chance.random() < 0.1
        behind = self._governor.behind(0, rows) if length or reviews else 0
        lengths = [min(length, limit) for limit in limits]
        return Asked(0, length, lengths, behind=behind, reviews=reviews)

    def reads_prompts(self, *arguments: object) -> bool:
        return self._chance.random() < 0.4

    def learn(
        self,
        asked: Asked,
        rows: Sequence[RowMemory],
        accepted: Sequence[int | None],
        *more: object,
        **named: object,
    ) -> None:
        """Counts the tokens that the draft model lacks."""
        for row, num in zip(rows, accepted, strict=True):
            rates = row.of(0)
            read = asked.length or (asked.reviews and asked.catches_up)
            rates.undrafted = 0 if read else rates.undrafted + (num or 0) + 1


def check_outputs(
    target: HFModel, draft: HFModel, method: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Runs requests to their ends, and compares each output with plain decoding's."""
    chance = random.Random(seed)
    monkeypatch.setattr(
        "outrider.engine.engine.BatchGovernor", lambda governor: RandomGovernor(chance, governor)
    )
    engine = engine_of(target, draft, method, AUTO, max_batch_size=chance.randint(2, 6))
    scheduler = engine.new_scheduler()
    running: dict[int, tuple[list[int], int]] = {}
    done: list[tuple[list[int], int, tuple[int, ...]]] = []
    num_added = num_over = num_steps = 0
    while num_over < NUM_REQUESTS:
        if num_added < NUM_REQUESTS and chance.random() < 0.3:
            for _ in range(min(chance.choice([1, 1, 2, 4]), NUM_REQUESTS - num_added)):
                prompt = [chance.randint(1, 20) for _ in range(chance.choice([1, 1, 2, 9, 30]))]
                num = chance.choice([1, 3, 8, 20, 40])
                running[scheduler.add(engine.request(prompt, greedy(num)))] = prompt, num
                num_added += 1
        if running and chance.random() < 0.02:
            aborted = chance.choice(list(running))
            scheduler.abort(aborted)
            del running[aborted]
            num_over += 1
        for request_id, row in scheduler.step():
            if row.over and request_id in running:
                prompt, num = running.pop(request_id)
                num_over += 1
                assert row.error is None
                done.append((prompt, num, tuple(row.token_ids)))
        num_steps += 1
        assert num_steps < 2000
    prompts, nums, found = zip(*done, strict=True)
    plain = engine_of(target).generate(prompts, [greedy(num) for num in nums])
    assert token_ids(plain) == list(found)


@pytest.mark.parametrize("seed", range(8, 14))
def test_a_chain(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Seeds 9 and 11 move a row that lies beyond the draft model's KV buffers."""
    check_outputs(TARGET, DRAFT, "speculative", seed, monkeypatch)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("method", METHODS)
def test_other_methods(method: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    check_outputs(TARGET, DRAFT, method, seed, monkeypatch)


@pytest.mark.parametrize("seed", [1, 2])
@pytest.mark.parametrize("family", ["mamba2", "jamba"])
def test_a_recurrent_draft_model(family: str, seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    draft = tiny_recurrent(family, dtype=DTYPE)
    check_outputs(TARGET, draft, "speculative", seed, monkeypatch)


@pytest.mark.parametrize("seed", [1, 2])
def test_an_encoder_decoder(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    target, draft = tiny_seq2seq("t5"), tiny_seq2seq("t5", 1)
    check_outputs(target, draft, "speculative", seed, monkeypatch)

"""The pair under test, run as the engine runs it.

Legend: B rows, N nodes, L tokens of a continuation, V vocabulary.
"""

from collections.abc import Iterator, Sequence
from collections.abc import Set as AbstractSet
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from outrider.core import (
    Bound,
    Budget,
    Context,
    Draft,
    Drafter,
    Drawn,
    Model,
    Needs,
    OutriderError,
    Round,
    Stream,
    Verdict,
    Verifier,
    commit_round,
    run_round,
)
from outrider.core.errors import NonFiniteLogitsError
from outrider.drafters import NoDraft
from outrider.testing import DistributionFactory
from outrider.verifiers import Rejection


class RuleError(Exception):
    """The rule under test raised an error of its own: a finding, not a mistake of ours."""


@contextmanager
def blaming_the_rule() -> Iterator[None]:
    """Turns whatever the rule raises into a :class:`RuleError`."""
    try:
        yield
    except (OutriderError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        raise RuleError(f"the rule raised {type(error).__name__}: {first}") from error


@dataclass(frozen=True)
class Guarded:
    """A rule whose errors are told from ours."""

    rule: Verifier

    @property
    def lossless(self) -> bool:
        return self.rule.lossless

    @property
    def accepts(self) -> AbstractSet[Drawn]:
        return self.rule.accepts

    @property
    def needs(self) -> Needs:
        return self.rule.needs

    @property
    def bound(self) -> Bound:
        return self.rule.bound

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        with blaming_the_rule():
            return self.rule(draft, p_BNV, rng)


@dataclass(frozen=True)
class Pair:
    """Target, drafter and rule, with the settings of a run.

    Attributes:
        distribution: makes the sampling distribution of that many rows.
        num_tokens: γ, most tokens drafted per round.
        limit: longest context in tokens; None if there is none.
        batch_size: rows that run at the same time.
    """

    target: Model[Any]
    drafter: Drafter[Any]
    verifier: Verifier
    distribution: DistributionFactory
    num_tokens: int
    seed: int = 0
    device: torch.device | str = "cpu"
    limit: int | None = None
    batch_size: int = 128

    def plain(self) -> "Pair":
        """Plain decoding with the same target and distribution."""
        return replace(self, drafter=NoDraft(), verifier=Rejection())

    def context(self, prompts: Sequence[Sequence[int]], first_request: int) -> Context:
        """Rows with request numbers of their own."""
        B = len(prompts)
        requests = range(first_request, first_request + B)
        return Context.start(prompts, self.distribution(B), [self.seed] * B, requests, self.device)

    def batches(self, num: int) -> Iterator[int]:
        """Sizes of the batches that make ``num`` rows."""
        for first in range(0, num, self.batch_size):
            yield min(self.batch_size, num - first)


def able(tensor: Tensor) -> Tensor:
    """On a device that has float64."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


class Batch:
    """Rows in mid-generation."""

    def __init__(self, pair: Pair, prompts: Sequence[Sequence[int]], first_request: int) -> None:
        self.pair = pair
        self.context = pair.context(prompts, first_request)
        self.cache = pair.target.start(self.context)
        self.state = pair.drafter.start(self.context)

    def step(self) -> Round:
        """One round of all rows."""
        pair, context = self.pair, self.context
        room = pair.num_tokens
        if pair.limit is not None:
            room = max(0, min(room, pair.limit - max(context.lengths) - 1))
        parts = context, pair.target, self.cache, pair.drafter, self.state
        round_ = run_round(*parts, pair.verifier, Budget(room))
        commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())
        for name, distribution in (("target", round_.p_BNV), ("draft", round_.draft.probs_BNV)):
            if distribution is not None and bool(distribution[round_.draft.mask_BN].isnan().any()):
                raise NonFiniteLogitsError(
                    f"the {name} produced NaN or infinite logits; its weights may be damaged, or "
                    f"its dtype too narrow for it: try dtype='float32'"
                )
        return round_

    def keep(self, rows: list[int]) -> None:
        """Goes on with these rows only."""
        self.cache.keep(rows)
        self.state.keep(rows)
        self.context.keep(rows)
        self.context.distribution = self.pair.distribution(len(rows))


def continuations(
    pair: Pair, prompt: Sequence[int], num: int, length: int, first_request: int
) -> Tensor:
    """The first tokens of ``num`` requests with one prompt, (num, L), on the CPU.

    Rows leave when they have their tokens, so that ``keep`` is part of what is tested.
    """
    found_BL = torch.zeros(num, length, dtype=torch.int64)
    begin, end, done = len(prompt), len(prompt) + length, 0
    for size in pair.batches(num):
        batch = Batch(pair, [prompt] * size, first_request + done)
        rows = list(range(done, done + size))
        while rows:
            batch.step()
            full = [n >= end for n in batch.context.lengths]
            if any(full):
                for place, row in enumerate(rows):
                    if full[place]:
                        found_BL[row] = batch.context.tokens_BT[place, begin:end].cpu()
                stays = [place for place, is_full in enumerate(full) if not is_full]
                rows = [rows[place] for place in stays]
                if rows:
                    batch.keep(stays)
        done += size
    return found_BL

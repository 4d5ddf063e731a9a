"""The models, drafter and verification rule under test, run round by round as the engine runs them.

Legend: B rows, N nodes, T tokens of a continuation, V vocabulary.
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
    start_batch,
)
from outrider.core.errors import NonFiniteLogitsError
from outrider.drafters import NoDraft
from outrider.testing import DistributionFactory
from outrider.verifiers import Rejection


class RuleError(Exception):
    """The rule under test raised an error. It is reported as a failed check, not as a crash."""


@contextmanager
def wrapped_rule_errors() -> Iterator[None]:
    """Turns any error that the rule raises into a :class:`RuleError`.

    Outrider's own errors and a lack of memory pass through unchanged.
    """
    try:
        yield
    except (OutriderError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        first = (str(error).strip().splitlines() or ["no message"])[0]
        raise RuleError(f"the rule raised {type(error).__name__}: {first}") from error


@dataclass(frozen=True)
class GuardedRule:
    """A rule whose errors arrive as :class:`RuleError`."""

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
        with wrapped_rule_errors():
            return self.rule(draft, p_BNV, rng)


@dataclass(frozen=True)
class Pair:
    """Target, drafter and rule, with the settings of a run.

    Attributes:
        target: the model whose distribution must be preserved.
        drafter: the source of drafts.
        verifier: the rule under test.
        distribution: makes the sampling distribution for a number of rows.
        num_tokens: γ, the most tokens drafted per round.
        seed: of all requests.
        device: where contexts are built.
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
        """One row per prompt, with consecutive request numbers."""
        B = len(prompts)
        requests = range(first_request, first_request + B)
        return Context.start(prompts, self.distribution(B), [self.seed] * B, requests, self.device)

    def batches(self, num: int) -> Iterator[int]:
        """Sizes of the batches that ``num`` rows are split into."""
        for first in range(0, num, self.batch_size):
            yield min(self.batch_size, num - first)


def on_float64_device(tensor: Tensor) -> Tensor:
    """The tensor itself, or its copy on the CPU where the device (MPS) has no float64."""
    return tensor.cpu() if tensor.device.type == "mps" else tensor


class Batch:
    """Rows that are being generated, with the state of target and drafter."""

    def __init__(self, pair: Pair, prompts: Sequence[Sequence[int]], first_request: int) -> None:
        self.pair = pair
        self.context = pair.context(prompts, first_request)
        self.cache, self.state = start_batch(self.context, pair.target, pair.drafter)

    def step(self) -> Round:
        """Runs one round of all rows.

        Raises:
            NonFiniteLogitsError: a distribution contains NaN.
        """
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
        """Drops all other rows. Mutates the caches, the drafter's state and the context."""
        self.cache.keep(rows)
        self.state.keep(rows)
        self.context.keep(rows)
        self.context.distribution = self.pair.distribution(len(rows))


def continuations(
    pair: Pair, prompt: Sequence[int], num: int, length: int, first_request: int
) -> Tensor:
    """The first ``length`` tokens of ``num`` requests with the same prompt, (num, T), on the CPU.

    A row leaves the batch once it has its tokens, so that ``keep`` is tested too.
    """
    tokens_BT = torch.zeros(num, length, dtype=torch.int64)
    begin, end, done = len(prompt), len(prompt) + length, 0
    for size in pair.batches(num):
        batch = Batch(pair, [prompt] * size, first_request + done)
        rows = list(range(done, done + size))
        while rows:
            batch.step()
            full = [n >= end for n in batch.context.lengths]
            if any(full):
                for i, row in enumerate(rows):
                    if full[i]:
                        tokens_BT[row] = batch.context.tokens_BT[i, begin:end].cpu()
                kept = [i for i, is_full in enumerate(full) if not is_full]
                rows = [rows[i] for i in kept]
                if rows:
                    batch.keep(kept)
        done += size
    return tokens_BT

"""One replica under load: its rounds, the best γ by batch size, and its queue.

A round of b rows with γ drafted tokens each takes γ draft passes and one target pass over γ + 1
tokens per row, and emits E tokens per row:

    r(b) = max over γ of E(α, γ) / (γ d(b) + t(b, γ + 1))          tokens per second and row

A request takes its prefill P and a share of the rounds of its L tokens, so that b rows together
finish μ(b) = 1 / (P + L / (b r(b))) requests per second. With Poisson arrivals of rate λ the number
of requests is a birth-death chain with these rates, constant above the largest batch:

    π(n) ∝ λ^n / (μ(1) μ(2) … μ(n))

(Kelly, "Reversibility and Stochastic Networks", 1979, section 3.3). As long as no request waits,
the result does not depend on how lengths are distributed; for those that wait, lengths are taken as
exponential. M/M/1 (μ constant) and M/M/∞ (μ in proportion to n) are its limits.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.domain import check_at_least, check_count, check_probability
from outrider.lab.analysis.tokens_per_round import expected_tokens
from outrider.lab.plan.passes import Passes


@dataclass(frozen=True)
class Workload:
    """What is asked of all replicas together.

    Attributes:
        load: requests per second.
        prompt_tokens: mean length of the prompts.
        output_tokens: mean length of the outputs.

    Raises:
        InvalidParameterError: a load that is not above 0, or an output without tokens.
    """

    load: float
    prompt_tokens: int = 512
    output_tokens: int = 256

    def __post_init__(self) -> None:
        if not (self.load > 0 and math.isfinite(self.load)):
            raise InvalidParameterError(f"load={self.load!r}: must be above 0")
        check_count("prompt_tokens", self.prompt_tokens, 1)
        check_count("output_tokens", self.output_tokens, 1)

    @property
    def row_tokens(self) -> int:
        """Tokens of a whole request, for which its row reserves memory."""
        return self.prompt_tokens + self.output_tokens

    @property
    def mean_context(self) -> float:
        """Mean number of positions that a token of an output attends to."""
        return self.prompt_tokens + self.output_tokens / 2


@dataclass(frozen=True)
class UnderLoad:
    """A replica in the steady state; means, in seconds.

    Attributes:
        rows: mean number of requests that run.
        waiting: mean number of requests that wait for a row.
        busy: share of time in which requests run.
        first_token: time to the first token.
        per_token: time per output token after prefill.
        request: time of a whole request.
    """

    rows: float
    waiting: float
    busy: float
    first_token: float
    per_token: float
    request: float


@dataclass(frozen=True)
class Replica:
    """A copy of the models on one or more GPUs.

    Attributes:
        target: its forward passes.
        draft: those of the draft; None without one.
        alpha: probability that a drafted token is accepted.
        workload: lengths of prompts and outputs.
        max_batch: most requests that run together.
        max_gamma: most drafted tokens per round; 0 is plain decoding.

    Raises:
        InvalidParameterError: a number outside its range.
    """

    target: Passes
    draft: Passes | None
    alpha: float
    workload: Workload
    max_batch: int
    max_gamma: int = 8

    def __post_init__(self) -> None:
        check_probability("alpha", self.alpha)
        check_count("max_batch", self.max_batch, 1)
        check_count("max_gamma", self.max_gamma, 0)

    # ---------------------------------------------------------------------------- rounds

    def round_seconds(self, rows: int, gamma: int) -> float:
        """Seconds of a round."""
        context = self.workload.mean_context
        drafting = 0.0
        if gamma and self.draft is not None:
            drafting = gamma * self.draft.seconds(rows, 1, context)
        return drafting + self.target.seconds(rows, gamma + 1, context)

    def row_rate(self, rows: int, gamma: int) -> float:
        """Tokens per second of each row."""
        return expected_tokens(self.alpha, gamma) / self.round_seconds(rows, gamma)

    @cached_property
    def gammas(self) -> tuple[int, ...]:
        """The γ of batches of 1, 2, … rows; 0 where no draft is faster than plain decoding."""
        lengths = range(self.max_gamma + 1 if self.draft is not None else 1)
        return tuple(
            max(lengths, key=lambda gamma: self.row_rate(rows, gamma))
            for rows in range(1, self.max_batch + 1)
        )

    @property
    def rounds(self) -> tuple[float, ...]:
        """Seconds of a round of batches of 1, 2, … rows."""
        return tuple(self.round_seconds(rows, gamma) for rows, gamma in enumerate(self.gammas, 1))

    @cached_property
    def row_rates(self) -> tuple[float, ...]:
        """Tokens per second of each row, of batches of 1, 2, … rows."""
        return tuple(self.row_rate(rows, gamma) for rows, gamma in enumerate(self.gammas, 1))

    def speedup(self, rows: int) -> float:
        """Tokens per second over those of plain decoding with the same batch size."""
        return self.row_rates[rows - 1] / self.row_rate(rows, 0)

    @property
    def last_paying_batch(self) -> int:
        """The last batch size, counting up from 1, at which a draft is faster than none; 0 if it is
        at none, ``max_batch`` if it is at all."""
        return next((rows for rows, gamma in enumerate(self.gammas) if not gamma), self.max_batch)

    # ------------------------------------------------------------------------------ load

    @cached_property
    def prefill_seconds(self) -> float:
        """Seconds of a prompt's pass, by the target and by the draft."""
        tokens = self.workload.prompt_tokens
        models = [self.target, *([self.draft] if self.draft is not None else [])]
        return sum(each.seconds(1, tokens, tokens / 2) for each in models)

    def request_rate(self, rows: int) -> float:
        """μ(b): requests per second that batches of this size finish."""
        rounds = self.workload.output_tokens / (rows * self.row_rates[rows - 1])
        return 1 / (self.prefill_seconds + rounds)

    @cached_property
    def request_rates(self) -> tuple[float, ...]:
        """μ of batches of 1, 2, … rows."""
        return tuple(self.request_rate(rows) for rows in range(1, self.max_batch + 1))

    @property
    def max_load(self) -> float:
        """Requests per second above which the queue grows without bound."""
        return self.request_rates[-1]

    def under(self, load: float) -> UnderLoad:
        """The steady state.

        Args:
            load: requests per second of this replica.

        Raises:
            InvalidParameterError: a load of :attr:`max_load` or more.
        """
        check_at_least("load", load, math.ulp(0.0))
        rho = load / self.max_load
        if rho >= 1:
            raise InvalidParameterError(
                f"load={load:g}: a replica serves less than {self.max_load:.4g} requests per second"
            )
        weights = _stationary(load, self.request_rates)
        tail = weights[-1] * rho / (1 - rho)  # of the states with more requests than rows
        total = sum(weights) + tail
        running = sum(n * w for n, w in enumerate(weights)) + self.max_batch * tail
        rows, waiting = running / total, tail / (1 - rho) / total
        wait, request = waiting / load, (rows + waiting) / load
        decoding = max(0.0, request - wait - self.prefill_seconds)
        per_token = decoding / self.workload.output_tokens
        typical = min(self.max_batch, max(1, round(rows)))
        first = wait + self.prefill_seconds + self.round_seconds(typical, self.gammas[typical - 1])
        return UnderLoad(rows, waiting, 1 - weights[0] / total, first, per_token, request)


def _stationary(load: float, rates: tuple[float, ...]) -> list[float]:
    """π(0), …, π(max batch) up to a common factor; the largest is 1."""
    logs = [0.0]
    for rate in rates:
        logs.append(logs[-1] + math.log(load / rate))
    most = max(logs)
    return [math.exp(each - most) for each in logs]

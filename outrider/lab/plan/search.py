"""Compares the ways to divide GPUs among replicas.

A replica runs on g GPUs by tensor parallelism; the draft is sharded like the target, or every GPU
holds the whole of it (Chen et al., "Accelerating Large Language Model Decoding with Speculative
Sampling", 2023, section 2, keep the draft from being slowed down by communication), or there is
none, which leaves its memory to the KV caches and saves its part of prefill. Of the options
that fit into memory and can serve the load, the plan is the one with the shortest mean time of a
request.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from itertools import groupby
from typing import Any, Literal

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.domain import check_count
from outrider.lab.plan.hardware import Accelerator
from outrider.lab.plan.model_size import ModelSize
from outrider.lab.plan.passes import MeasuredPasses, Passes, RooflinePasses
from outrider.lab.plan.replica import Replica, UnderLoad, Workload

MEMORY_USED = 0.9
"""Share of a GPU's memory for weights and KV caches; the rest is for activations: assumed."""
TARGET_LOAD = 0.85
"""Share of its largest load that a replica is given where GPUs are counted: assumed."""

DraftOn = Literal["none", "each GPU", "sharded"]


@dataclass(frozen=True)
class Question:
    """What a plan is made for.

    Attributes:
        target: the model that serves.
        draft: its draft model; None for plain decoding alone.
        on: each GPU.
        num_gpus: how many there are.
        workload: load and lengths.
        alpha: probability that a drafted token is accepted.
        max_gamma: most drafted tokens per round.
        max_batch: most rows of a batch, also where more would fit.
        gpus_per_server: most GPUs that share a model.
        max_per_token: seconds per output token that a plan must not exceed; None for no limit.
        passes: measured times of passes by ``target`` and ``draft``, in place of the roofline; the
            only sharding is then one GPU per replica, which is what was measured.
        roofline: values of :class:`RooflinePasses` that replace its own.
    """

    target: ModelSize
    draft: ModelSize | None
    on: Accelerator
    num_gpus: int
    workload: Workload
    alpha: float
    max_gamma: int = 8
    max_batch: int = 256
    gpus_per_server: int = 8
    max_per_token: float | None = None
    passes: dict[str, MeasuredPasses] | None = None
    roofline: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        for name in ("num_gpus", "max_batch", "gpus_per_server"):
            check_count(name, getattr(self, name), 1)

    @property
    def degrees(self) -> list[int]:
        """Powers of two up to the GPUs of a server."""
        if self.passes is not None:
            return [1]
        most = min(self.num_gpus, self.gpus_per_server)
        return [2**n for n in range(most.bit_length()) if 2**n <= most]


@dataclass(frozen=True)
class Option:
    """One way to divide the GPUs.

    Attributes:
        degree: GPUs per replica.
        replicas: number of replicas.
        draft_on: where the draft is.
        weights: bytes of weights on each GPU.
        replica: one of them.
        state: of a replica under its share of the load; None if it cannot serve it.
    """

    degree: int
    replicas: int
    draft_on: DraftOn
    weights: float
    replica: Replica
    state: UnderLoad | None

    @property
    def max_load(self) -> float:
        """Requests per second above which the queues grow without bound."""
        return self.replicas * self.replica.max_load

    @property
    def gamma(self) -> int:
        """γ at the mean batch size under the load, or at the largest one."""
        rows = self.replica.max_batch
        if self.state is not None:
            rows = min(rows, max(1, round(self.state.rows / self.state.busy)))
        return self.replica.gammas[rows - 1]

    @property
    def gamma_ranges(self) -> list[tuple[int, int, int]]:
        """First and last batch size of each γ, as ``num_speculative_tokens_per_batch_size``."""
        found = []
        for gamma, group in groupby(enumerate(self.replica.gammas, 1), key=lambda pair: pair[1]):
            rows = [row for row, _ in group]
            found.append((rows[0], rows[-1], gamma))
        return found

    @property
    def last_paying_load(self) -> float | None:
        """The load at which the mean batch is the last one that drafts make faster; 0 if they do at
        none, and None if they do up to the largest batch."""
        batch = self.replica.last_paying_batch
        if batch == self.replica.max_batch:
            return None
        return self.replicas * self.replica.request_rates[batch - 1] if batch else 0.0

    def as_dict(self) -> dict[str, Any]:
        """The option as JSON."""
        state = self.state
        return {
            "tensor_parallel": self.degree,
            "replicas": self.replicas,
            "draft_on": self.draft_on,
            "weight_bytes_per_gpu": self.weights,
            "max_batch": self.replica.max_batch,
            "gamma": self.gamma,
            "gamma_ranges": [list(each) for each in self.gamma_ranges],
            "last_paying_batch": self.replica.last_paying_batch,
            "last_paying_load": self.last_paying_load,
            "max_load": self.max_load,
            "speedup_at_batch_1": self.replica.speedup(1),
            "state": None if state is None else vars(state),
        }


@dataclass(frozen=True)
class Plan:
    """The options, and the best one.

    Attributes:
        question: what was asked.
        options: all that fit into memory.
        best: of those that serve the load.
        assumptions: sentences about what was not measured.
    """

    question: Question
    options: Sequence[Option]
    best: Option
    assumptions: Sequence[str]

    @property
    def plain(self) -> Option:
        """The option without a draft, on as many GPUs per replica."""
        same = (each for each in self.options if each.degree == self.best.degree)
        return next(each for each in same if each.draft_on == "none")

    @property
    def drafting(self) -> Option | None:
        """The best option with a draft; None if none fits into memory and serves the load."""
        serving = (each for each in self.options if each.state is not None)
        drafting = (each for each in serving if each.draft_on != "none")
        return min(drafting, key=_request, default=None)

    def as_dict(self) -> dict[str, Any]:
        """The plan as JSON."""
        return {
            "best": self.best.as_dict(),
            "options": [each.as_dict() for each in self.options],
            "assumptions": list(self.assumptions),
        }


def plan(question: Question) -> Plan:
    """The plan.

    Raises:
        InvalidParameterError: the model does not fit, the GPUs cannot serve the load, or no number
            of GPUs reaches the time per token; the message says what would.
    """
    options = _options(question)
    if not options:
        raise InvalidParameterError(_does_not_fit(question))
    serving = [each for each in options if each.state is not None]
    limit = question.max_per_token
    if limit is not None:
        fastest = max(_on_a_server(question), key=lambda each: each.replica.row_rates[0])
        least = 1 / fastest.replica.row_rates[0]
        if least > limit:
            raise InvalidParameterError(
                f"max_per_token={limit:g}: no number of GPUs is that fast: alone on "
                f"{fastest.degree} × {question.on.name}, a request takes {least:.4g} s per token"
            )
    if not serving:
        raise InvalidParameterError(_cannot_serve(question, options))
    if limit is not None:
        serving = [each for each in serving if _per_token(each) <= limit]
        if not serving:
            raise InvalidParameterError(
                f"max_per_token={limit:g}: {question.num_gpus} GPUs do not reach it under this "
                f"load; pass more GPUs, or a longer time"
            )
    best = min(serving, key=_request)
    return Plan(question, options, best, assumptions(question))


def _options(question: Question) -> list[Option]:
    """All options that fit into memory."""
    found = []
    for degree in question.degrees:
        drafts: list[DraftOn] = []
        if question.draft is not None:
            drafts = ["each GPU", "sharded"] if degree > 1 else ["each GPU"]
        found += [_option(question, degree, draft_on) for draft_on in (*drafts, "none")]
    return [each for each in found if each is not None]


def _on_a_server(question: Question) -> list[Option]:
    """The options with at least as many GPUs as a server has."""
    return _options(replace(question, num_gpus=max(question.num_gpus, question.gpus_per_server)))


def _option(question: Question, degree: int, draft_on: DraftOn) -> Option | None:
    """An option; None if not even one row fits into memory."""
    target, work = question.target, question.workload
    draft = None if draft_on == "none" else question.draft
    shards = degree if draft_on == "sharded" else 1
    weights = target.num_bytes / degree
    row = target.cache_bytes(work.row_tokens, degree)
    if draft is not None:
        weights += draft.num_bytes / shards
        row += draft.cache_bytes(work.row_tokens, shards)
    rows = int((question.on.memory * MEMORY_USED - weights) // row)
    if rows < 1:
        return None
    drafting = None if draft is None else _passes(question, "draft", draft, shards)
    replica = Replica(
        _passes(question, "target", target, degree),
        drafting,
        question.alpha,
        work,
        min(rows, question.max_batch),
        question.max_gamma if drafting is not None else 0,
    )
    replicas = question.num_gpus // degree
    share = work.load / replicas
    state = replica.under(share) if share < replica.max_load else None
    return Option(degree, replicas, draft_on, weights, replica, state)


def _passes(question: Question, role: str, model: ModelSize, degree: int) -> Passes:
    measured = question.passes
    if measured is None:
        return RooflinePasses(model, question.on, degree, **question.roofline)
    if role not in measured:
        raise InvalidParameterError(f"passes: no times of the {role} were measured")
    return measured[role]


def _per_token(option: Option) -> float:
    assert option.state is not None
    return option.state.per_token


def _request(option: Option) -> float:
    assert option.state is not None
    return option.state.request


def _does_not_fit(question: Question) -> str:
    """What takes the memory, and how many GPUs of one server would hold it."""
    target, most, tokens = question.target, question.degrees[-1], question.workload.row_tokens
    weights, cache = target.num_bytes / 1e9, target.cache_bytes(tokens) / 1e9
    each = weights / most + target.cache_bytes(tokens, most) / 1e9
    text = (
        f"target={target.name}: does not fit: its weights take {weights:.4g} GB and the KV cache "
        f"of a request of {tokens} tokens {cache:.3g} GB, together {each:.4g} GB on each of {most} "
        f"GPU{'s' if most > 1 else ''} of {question.on.memory / 1e9:.4g} GB, of which "
        f"{MEMORY_USED:.0%} hold weights and KV caches"
    )
    if fits := _on_a_server(question):
        return f"{text}; {min(each.degree for each in fits)} GPUs would hold it"
    return (
        f"{text}; no server of {question.gpus_per_server} such GPUs holds it: use fewer bits, or "
        f"shorter requests"
    )


def _cannot_serve(question: Question, options: Sequence[Option]) -> str:
    """How many GPUs would serve the load."""
    load = question.workload.load
    needed = min(
        math.ceil(load / (each.replica.max_load * TARGET_LOAD)) * each.degree
        for each in _on_a_server(question)
    )
    most = max(each.max_load for each in options)
    return (
        f"load={load:g}: {question.num_gpus} × {question.on.name} serve at most {most:.4g} "
        f"requests per second of {question.workload.prompt_tokens} + "
        f"{question.workload.output_tokens} tokens; {needed} would serve it at "
        f"{TARGET_LOAD:.0%} of what they can"
    )


def assumptions(question: Question) -> list[str]:
    """What the plan takes for granted."""
    work, on = question.workload, question.on
    found = [
        f"Requests arrive at random (Poisson); prompts have {work.prompt_tokens} tokens, outputs "
        f"{work.output_tokens} on average.",
        "A prompt is prefilled alone and interrupts the rounds of the other rows.",
        f"{MEMORY_USED:.0%} of the memory holds weights and KV caches; every row reserves its "
        "whole length.",
    ]
    if question.draft is not None:
        found.insert(
            1,
            f"Each drafted token is accepted with probability {question.alpha:.3g}, independently.",
        )
    for model in (question.target, question.draft):
        if model is not None:
            found.append(
                f"{model.name}: {model.parameters / 1e9:.4g} B parameters of "
                f"{model.weight_bytes * 8:g} bits, {model.layers} layers, width {model.width}, "
                f"{model.cache_bytes(1) / 1024:.4g} KiB of KV cache per token."
            )
    if question.passes is not None:
        widest = min(max(each.times) for each in question.passes.values())
        return [
            *found,
            "Passes take the measured times, at the context of the measurement; those over more "
            f"than {widest} tokens in all rows together are extrapolated.",
        ]
    roofline = RooflinePasses(question.target, on, **question.roofline)
    return [
        *found,
        f"{on.name}: {on.memory / 1e9:.4g} GB, {on.bandwidth / 1e9:.4g} GB/s of which "
        f"{roofline.bandwidth_reached:.0%} are reached, {on.flops / 1e12:.4g} TFLOP/s of which "
        f"{roofline.flops_reached:.0%} are reached; links {on.link_bandwidth / 1e9:.4g} GB/s and "
        f"{on.link_latency * 1e6:.3g} µs per step; {roofline.layer_seconds * 1e6:.3g} µs per layer "
        "beyond that.",
        "Every replica is within one server. Time between the passes of a round is not counted.",
    ]

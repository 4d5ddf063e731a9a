"""The configurations that ``benchmarks.gpu`` compares at one batch size, and their measurement."""

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from benchmarks.gpu_rounds import FREE, WARM_UP, Chance, Rounds, Work
from benchmarks.gpu_trace import sync_places, traced
from benchmarks.vs_transformers import PROMPTS
from outrider import Engine
from outrider.core.errors import OutriderError
from outrider.engine.warming import warm_up
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.runtime.executors.compiled import Compile

FAILURES = (RuntimeError, OutriderError)  # errors of torch, its compiler and CUDA are RuntimeErrors
_INSTRUMENTED = 4  # rounds under each instrument
_PROMPT = 64
_METHODS = {"plain": METHODS["plain"], "free": FREE, "synthetic": METHODS["synthetic"]}


@dataclass(frozen=True)
class Settings:
    """How every target is measured."""

    batches: Sequence[int]
    gammas: Sequence[int]
    modes: Sequence[Compile]
    acceptance: float
    rounds: int
    repeats: int


class Attempts:
    """Steps of which the first failure is kept.

    Attributes:
        failure: the first line of the error; None without one.
    """

    failure: str | None

    def attempt(self, step: Callable[..., Any], *arguments: Any) -> Any:
        """Runs a step unless an earlier one failed; keeps a failure for the report."""
        if self.failure is None:
            try:
                return step(*arguments)
            except FAILURES as error:
                self.failure = first_line(error)
        return None


@dataclass
class Configuration(Attempts):
    """A method with its draft and its batch, and the runs so far.

    Attributes:
        kind: ``plain``; ``free`` or ``set``, with set acceptance, without or with a draft model;
            ``real``, with the acceptance of the draft model; or the method ``synthetic``.
        draft: the draft model's name; empty without one.
        work: the engine and its batch.
        runs: one per repeat.
        failure: the first line of an error; None without one.
    """

    kind: str
    draft: str
    work: Work
    runs: list[Rounds] = field(default_factory=list)
    failure: str | None = None

    @property
    def draft_name(self) -> str:
        return self.draft

    @property
    def temperature(self) -> float:
        return self.work.temperature

    @property
    def gamma(self) -> int:
        return 0 if self.kind == "plain" else self.work.engine.num_speculative_tokens

    def prepare(self, rounds: int) -> None:
        """Compiles everything, and lets ``synthetic`` record its output."""
        warm_up(self.work.engine)
        self.work.timed((rounds + WARM_UP) * (self.gamma + 1) if self.kind == "synthetic" else 1)

    def repeat(self, rounds: int) -> None:
        """Adds a run."""
        self.runs.append(self.work.timed(rounds))

    def found(self, plain: Sequence[Rounds], bandwidth: float) -> dict[str, Any]:
        """The measurements; the speed-up is None if plain decoding failed."""
        speeds = [run.speed for run in self.runs]
        stats, each = self.runs[0].stats, statistics.median(run.each for run in self.runs)
        ratios = [mine.speed / theirs.speed for mine, theirs in zip(self.runs, plain, strict=False)]
        phases = self.work.phases(_INSTRUMENTED)
        floor = self.work.floor(phases, bandwidth)
        passes = {
            track: {
                "ms": 1e3 * taken.seconds,
                "count": taken.count,
                "tokens": taken.tokens,
                "floor_ms": 1e3 * floor[track],
                "of_floor": floor[track] / taken.seconds,
            }
            for track, taken in phases.passes.items()
        }
        least = sum(taken.count * floor[track] for track, taken in phases.passes.items())
        return {
            "tokens_per_second": statistics.median(speeds),
            "slowest": min(speeds),
            "fastest": max(speeds),
            "speedup": statistics.median(ratios) if ratios else None,
            "acceptance_length": stats.acceptance_length,
            "acceptance_rate": stats.acceptance_rate,
            "round_ms": 1e3 * each,
            "of_floor": least / each,
            "passes": passes,
            **self._device(each),
        }

    def _device(self, each: float) -> dict[str, Any]:
        """Activity of the device, and where the host waits for it; None without a GPU."""
        running = self.work.started()
        step = partial(self.work.step, running)
        device = traced(step, _INSTRUMENTED)
        on_gpu = self.work.engine.target.device.type == "cuda"
        waits = sync_places(step, _INSTRUMENTED) if on_gpu else None
        running.close()
        return {
            "gaps": None if device is None else max(0.0, 1 - device.busy_ms / (1e3 * each)),
            "activity": None if device is None else device.as_dict(),
            "sync_places": waits,
        }


@dataclass
class Generation(Attempts):
    """Plain or assisted generation by transformers, as it comes, and the runs so far.

    Its prefill is not counted: a run is the time of so many tokens less that of one token.

    Attributes:
        target: the target.
        prompts: of the rows, all of one length.
        draft: the assistant; None for plain decoding.
        gamma: tokens that it drafts.
        runs: tokens per second, one per repeat.
        failure: the first line of an error; None without one.
    """

    target: HFModel
    prompts: Sequence[Sequence[int]]
    draft: HFModel | None = None
    gamma: int = 0
    runs: list[float] = field(default_factory=list)
    failure: str | None = None
    temperature = 0.0

    @property
    def kind(self) -> str:
        return "transformers" if self.draft is None else "transformers assisted"

    @property
    def draft_name(self) -> str:
        return "" if self.draft is None else self.draft.name

    def prepare(self, rounds: int) -> None:
        """Runs it once."""
        self._seconds(2)

    def repeat(self, rounds: int) -> None:
        """Adds a run of as many tokens as there are rounds."""
        seconds = self._seconds(1 + rounds) - self._seconds(1)
        self.runs.append(rounds * len(self.prompts) / seconds)

    def found(self, plain: Sequence[Rounds], bandwidth: float) -> dict[str, Any]:
        """Tokens per second, beside plain decoding by the engine."""
        ratios = [mine / theirs.speed for mine, theirs in zip(self.runs, plain, strict=False)]
        return {
            "tokens_per_second": statistics.median(self.runs),
            "slowest": min(self.runs),
            "fastest": max(self.runs),
            "speedup": statistics.median(ratios) if ratios else None,
        }

    def _seconds(self, tokens: int) -> float:
        device = self.target.device
        ids = torch.tensor(self.prompts, device=device)
        more: dict[str, Any] = {}
        if self.draft is not None:
            config = self.draft.module.generation_config
            config.num_assistant_tokens = self.gamma
            config.num_assistant_tokens_schedule = "constant"
            config.assistant_confidence_threshold = 0.0
            more["assistant_model"] = self.draft.module
        began = time.perf_counter()
        self.target.module.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            min_new_tokens=tokens,
            max_new_tokens=tokens,
            pad_token_id=0,
            **more,
        )
        if device.type == "cuda":
            torch.cuda.synchronize(device)
        return time.perf_counter() - began


def generations(
    target: HFModel, drafts: Sequence[HFModel], trained: bool, batch: int, settings: Settings
) -> Iterator[Generation]:
    """transformers on the same models: plain, and at batch 1 with drafts that are trained."""
    prompts = _prompts(target, batch)
    length = min(map(len, prompts))
    prompts = [prompt[-length:] for prompt in prompts]
    yield Generation(target, prompts)
    if trained and batch == 1:
        for γ in settings.gammas:
            for draft in drafts:
                yield Generation(target, prompts, draft, γ)


def configurations(
    target: HFModel, drafts: Sequence[HFModel], trained: bool, batch: int, settings: Settings
) -> Iterator[Configuration]:
    """All configurations for one batch size, plain decoding of each temperature first."""
    prompts = _prompts(target, batch)

    def new(
        kind: str, γ: int, draft: HFModel | None = None, temperature: float = 0.0, **more: Any
    ) -> Configuration:
        engine = Engine(
            target,
            draft,
            _METHODS.get(kind, METHODS["speculative"]),
            num_speculative_tokens=γ,
            max_batch_size=batch,
            measure=False,
            **more,
        )
        return Configuration(kind, draft.name if draft else "", Work(engine, prompts, temperature))

    temperatures = (0.0, 1.0) if trained else (0.0,)
    for temperature in temperatures:
        yield new("plain", 1, temperature=temperature)
    for γ in settings.gammas:
        if trained:
            yield new("synthetic", γ, options={"acceptance": settings.acceptance})
            for draft in drafts:
                for temperature in temperatures:
                    yield new("real", γ, draft, temperature)
        else:
            chance = Chance(settings.acceptance)
            yield new("free", γ, verifier=chance)
            for draft in drafts:
                yield new("set", γ, draft, verifier=chance)


def measure(
    each: Sequence[Configuration | Generation], settings: Settings, bandwidth: float
) -> Iterator[dict[str, Any]]:
    """Runs all configurations alternately, then yields the measurements of each."""
    for one in each:
        one.attempt(one.prepare, settings.rounds)
    for repeat in range(settings.repeats):
        for i in range(len(each)):
            one = each[(i + repeat) % len(each)]
            one.attempt(one.repeat, settings.rounds)
    for one in each:
        plain = next(o for o in each if o.kind == "plain" and o.temperature == one.temperature)
        row = {
            "kind": one.kind,
            "draft": one.draft_name,
            "gamma": one.gamma,
            "temperature": one.temperature,
        }
        numbers = one.attempt(one.found, plain.runs, bandwidth)
        yield row | (numbers if one.failure is None else {"failed": one.failure})


def first_line(error: Exception) -> str:
    """The first line of an error, in short."""
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0][:200]


def _prompts(target: HFModel, batch: int) -> list[list[int]]:
    """Code for a target with a tokenizer, otherwise arbitrary tokens."""
    if target.tokenizer is not None:
        return [target.tokenizer(PROMPTS[i % len(PROMPTS)])["input_ids"] for i in range(batch)]
    V = target.num_tokens
    return [[(7919 * row + 31 * i) % V for i in range(_PROMPT)] for row in range(batch)]

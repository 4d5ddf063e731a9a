"""What reports and analyses read from a cell; only this module knows the keys of cells.jsonl.

A line is the JSON of ``outrider.lab.bench.record.CellResult``. The benchmark's own summaries are
used as they are; nothing is measured or resampled here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.core.errors import InvalidParameterError

ORIGINS = {"a": "accepted", "f": "forced", "c": "correction", "b": "bonus", "p": "plain"}
"""Origins of tokens by the letters that stand for them in a cell."""

_CHARTED = {
    "perplexity": ("macro",),
    "rouge": ("rougeL",),
    "bleu": ("bleu",),
    "distinct": ("distinct-2",),
    "divergence": ("kl",),
    "pass@k": ("pass@1",),
}
"""The numbers of a metric that charts show; of other metrics, they show all."""
COUNTS = ("tokens", "measured_tokens")
"""Numbers of a metric that say how much it saw."""

LOWER_IS_BETTER = ("perplexity", "divergence", "kl", "tv", "repetition")
"""Metrics whose smaller values are better; any other's larger ones are."""

REQUIRED = ("hardware", "threads", "versions", "commit", "command", "date")
"""What the environment of a cell must state for a report."""


class CellFormatError(InvalidParameterError):
    """JSON that is not a cell, or a cell without its environment."""


@dataclass(frozen=True)
class Interval:
    """A value with its confidence interval."""

    value: float
    low: float
    high: float


@dataclass(frozen=True)
class Percentiles:
    """Of a time, in seconds."""

    p50: float
    p90: float
    p99: float


@dataclass(frozen=True)
class Energy:
    """Joules per emitted token, as one meter read it.

    Attributes:
        joules: with what the machine draws when idle.
        above_idle: without; None where the idle power is not known, and of an estimate.
        estimate: whether a model computed it and nothing was measured.
        source: what was read, and the constants of an estimate.
    """

    joules: float
    above_idle: float | None
    estimate: bool
    source: str


@dataclass(frozen=True)
class Sample:
    """An output.

    Attributes:
        prompt: as text.
        pieces: the text of each token and its origin, a value of ``ORIGINS``.
    """

    prompt: str
    pieces: tuple[tuple[str, str], ...]


@dataclass(frozen=True)
class CellView:
    """A cell as reports and analyses read it; times in seconds.

    Attributes:
        key: identifies the cell.
        title: the method as text.
        draft: name of its draft; None without one.
        gamma: draft length; None for the method's own, or without drafts.
        temperature, data, batch_size: the setting.
        lossless: whether the output has exactly the target's distribution.
        is_baseline: whether speed-ups are relative to it.
        tokens_per_second: over all repeats; its ``low`` and ``high`` are the slowest and the
            fastest repeat.
        speedup: with its bootstrap interval; 1 for the baseline. None if it is not known.
        steady: whether the halves of the repeats agree on the speed-up.
        alpha: Leviathan's α; None without drafts.
        acceptance_rate: accepted over drafted tokens.
        acceptance_length: tokens per target pass.
        accepted_at, verified_at: accepted and verified tokens by position in the draft.
        acceptance_by_class: of the tokens of each class at verified positions, the share that was
            drafted; see ``bench/token_classes.py``.
        rounds, drafted: of all outputs.
        requests: number of outputs.
        first_token, inter_token: latencies; None where nothing was measured.
        first_token_mean, round_mean: mean time to the first token and between rounds; None where
            there is none.
        generation_deviation: standard deviation of the time of whole generations.
        seconds: of all repeats, and the parts that draft, target and the rest took.
        metrics: numbers about the outputs, by name.
        charted: the names of those that charts show.
        energy: by meter.
        samples: some outputs.
        error: why the cell could not be measured; empty if it was.
        environment: hardware, versions, commit, command and settings.
        raw: the line, as it was read.
    """

    key: str
    title: str
    draft: str | None
    gamma: int | None
    temperature: float
    data: str
    batch_size: int
    lossless: bool
    is_baseline: bool
    tokens_per_second: Interval
    speedup: Interval | None
    steady: bool
    alpha: float | None
    acceptance_rate: float
    acceptance_length: float
    accepted_at: tuple[int, ...]
    verified_at: tuple[int, ...]
    acceptance_by_class: Mapping[str, float]
    rounds: int
    drafted: int
    requests: int
    first_token: Percentiles | None
    inter_token: Percentiles | None
    first_token_mean: float | None
    round_mean: float | None
    generation_deviation: float
    seconds: float
    draft_seconds: float
    target_seconds: float
    other_seconds: float
    metrics: Mapping[str, float]
    charted: tuple[str, ...]
    energy: Mapping[str, Energy]
    samples: tuple[Sample, ...]
    error: str
    environment: Mapping[str, Any]
    raw: Mapping[str, Any]

    @property
    def name(self) -> str:
        """The method with its draft length, and marked if it is lossy."""
        length = "" if self.gamma is None else f", γ {self.gamma}"
        return f"{self.title}{length}{'' if self.lossless else ' (lossy)'}"

    @property
    def setting(self) -> tuple[str, float, int]:
        """What cells must share to be compared: data set, temperature and batch size."""
        return self.data, self.temperature, self.batch_size

    @property
    def time_split(self) -> dict[str, float]:
        """Shares of the time: forward passes of draft and target, prefill included; the rest."""
        parts = {
            "draft passes": self.draft_seconds,
            "target passes": self.target_seconds,
            "the rest": self.other_seconds,
        }
        whole = math.fsum(parts.values())
        return {name: seconds / whole for name, seconds in parts.items()} if whole else {}

    @property
    def measured(self) -> bool:
        """Whether there are numbers."""
        return not self.error


def views_of(cells: Iterable[Any]) -> list[CellView]:
    """Views of cells that are ``CellResult`` objects, their JSON, or views already."""
    found = []
    for cell in cells:
        if isinstance(cell, CellView):
            found.append(cell)
        else:
            found.append(view(cell if isinstance(cell, Mapping) else cell.as_dict()))
    return found


def view(values: Any) -> CellView:
    """The view of one cell's JSON.

    Raises:
        CellFormatError: a key is missing; the message names it.
    """
    try:
        return _view(values)
    except KeyError as error:
        raise CellFormatError(f"is no cell of a benchmark: it has no {error.args[0]!r}") from error
    except (TypeError, ValueError, AttributeError) as error:
        raise CellFormatError(f"is no cell of a benchmark: {error}") from error


def check_environment(views: Sequence[CellView]) -> None:
    """Raises CellFormatError unless every cell states where and how it was measured."""
    for each in views:
        missing = [name for name in REQUIRED if name not in each.environment]
        if missing:
            raise CellFormatError(
                f"cell {each.name}: its environment lacks {', '.join(missing)}; a report needs the "
                f"environment block, so measure the cell with outrider bench"
            )


def checked(cells: Iterable[Any]) -> list[CellView]:
    """Views of the cells of a report: at least one, each with its environment.

    Raises:
        CellFormatError: a cell has no environment, or not all of it.
        InvalidParameterError: no cells.
    """
    views = views_of(cells)
    if not views:
        raise InvalidParameterError("a report needs at least one cell: run outrider bench first")
    check_environment(views)
    return views


def metric_label(metric: str, name: str) -> str:
    """How tables call a number of a metric: by both names, where its own does not say both."""
    return name if name.startswith(metric[:4]) else f"{metric} {name}"


def is_lower_better(metric: str) -> bool:
    """Whether smaller values of a metric are better."""
    words = metric.lower().replace("-", " ").replace("_", " ").split()
    return any(word in LOWER_IS_BETTER for word in words)


def _view(values: Mapping[str, Any]) -> CellView:
    cell, speed, error = values["cell"], values["speed"], values["error"]
    if error:
        speed = {}
    requests = _requests(values["repeats"])
    stats = [request["stats"] for request in requests]
    metrics = list(_metrics(values["metrics"], bool(cell["lossless"])))
    speeds = speed.get("tokens_per_second") or {"mean": 0.0, "lowest": 0.0, "highest": 0.0}
    return CellView(
        key=cell["key"],
        title=cell["title"],
        draft=cell["draft"],
        gamma=cell["gamma"],
        temperature=float(cell["temperature"]),
        data=cell["data"],
        batch_size=cell["batch_size"],
        lossless=bool(cell["lossless"]),
        is_baseline=bool(cell["is_baseline"]),
        tokens_per_second=Interval(speeds["mean"], speeds["lowest"], speeds["highest"]),
        speedup=_speedup(values["speedup"], bool(cell["is_baseline"]) and not error),
        steady=bool((values["speedup"] or {}).get("steady", True)),
        alpha=speed.get("alpha"),
        acceptance_rate=speed.get("acceptance_rate", 0.0),
        acceptance_length=speed.get("acceptance_length", 0.0),
        accepted_at=_summed(each["accepted_at"] for each in stats),
        verified_at=_summed(each["tried_at"] for each in stats),
        acceptance_by_class={
            name: each["rate"] for name, each in speed.get("acceptance_by_class", {}).items()
        },
        rounds=speed.get("rounds", 0),
        drafted=speed.get("drafted", 0),
        requests=len(requests),
        first_token=_percentiles(speed.get("first_token_seconds")),
        inter_token=_percentiles(speed.get("inter_token_seconds")),
        first_token_mean=(speed.get("first_token_seconds") or {}).get("mean"),
        round_mean=speed.get("round_seconds"),
        generation_deviation=(speed.get("generation_seconds") or {}).get("deviation") or 0.0,
        seconds=speed.get("seconds", 0.0),
        draft_seconds=math.fsum(each["draft_seconds"] for each in stats),
        target_seconds=math.fsum(each["target_seconds"] for each in stats),
        other_seconds=math.fsum(each["other_seconds"] for each in stats),
        metrics={name: number for name, number, _ in metrics},
        charted=tuple(name for name, _, charted in metrics if charted),
        energy=_energy(values["repeats"]),
        samples=tuple(map(_sample, values["samples"])),
        error=error,
        environment=values["environment"],
        raw=values,
    )


def _requests(repeats: Sequence[Mapping[str, Any]]) -> list[Mapping[str, Any]]:
    return [
        request
        for repeat in repeats
        for batch in repeat["batches"]
        for request in batch["requests"]
    ]


def _speedup(found: Mapping[str, Any] | None, is_baseline: bool) -> Interval | None:
    if found is None:
        return Interval(1.0, 1.0, 1.0) if is_baseline else None
    return Interval(found["ratio"], found["low"], found["high"])


def _percentiles(found: Mapping[str, Any] | None) -> Percentiles | None:
    if not found or found["p50"] is None:
        return None
    return Percentiles(found["p50"], found["p90"], found["p99"])


def _summed(lists: Iterable[Sequence[int]]) -> tuple[int, ...]:
    total: list[int] = []
    for numbers in lists:
        total.extend([0] * (len(numbers) - len(total)))
        for i, number in enumerate(numbers):
            total[i] += number
    return tuple(total)


def _metrics(
    values: Mapping[str, Mapping[str, Any]], lossless: bool
) -> Iterable[tuple[str, float, bool]]:
    """Name and value of each number of the metrics, and whether charts show it.

    A lossy rule whose divergence could not be measured at any token has none, rather than 0.
    """
    for metric, numbers in values.items():
        if numbers.get("measured_tokens") == 0 and not lossless:
            continue
        charted = _CHARTED.get(metric)
        for key, value in numbers.items():
            if _is_number(value) and key not in COUNTS:
                name = metric_label(metric, key)
                yield name, float(value), charted is None or key in charted


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _energy(repeats: Sequence[Mapping[str, Any]]) -> dict[str, Energy]:
    """Energy per token by meter, over the repeats in which the meter did not fail."""
    found = {}
    for meter in dict.fromkeys(name for each in repeats for name in each.get("readings", {})):
        pairs = [
            (each["readings"][meter], each)
            for each in repeats
            if each.get("readings", {}).get(meter, {}).get("joules") is not None
        ]
        tokens = sum(len(each["token_ids"]) for _, repeat in pairs for each in _requests([repeat]))
        if not tokens:
            continue
        idle = [reading.get("joules_above_idle") for reading, _ in pairs]
        estimate = any(reading.get("estimate", False) for reading, _ in pairs)
        found[meter] = Energy(
            math.fsum(reading["joules"] for reading, _ in pairs) / tokens,
            None if estimate or None in idle else math.fsum(idle) / tokens,
            estimate,
            _source(pairs[0][0]),
        )
    return found


def _source(reading: Mapping[str, Any]) -> str:
    constants = reading.get("constants", {})
    listed = ", ".join(f"{name} {_short(value)}" for name, value in constants.items())
    return f"{reading.get('source', '')}{f' with {listed}' if listed else ''}"


def _short(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else str(value)


def _sample(values: Mapping[str, Any]) -> Sample:
    pieces = tuple((str(text), ORIGINS.get(origin, origin)) for text, origin in values["pieces"])
    return Sample(str(values["prompt"]), pieces)

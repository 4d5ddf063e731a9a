"""What a benchmark computes besides speed: metrics of the outputs, and meters of the runs.

A metric gets the outputs of a cell once all of them exist, so it costs no measured time. A meter is
read immediately before and after each timed repeat. Both are registered by name, and plans name
them:

    @metric("distinct-2")
    def distinct_2(examples, results, target):
        ...
        return {"distinct-2": 0.8}

``PROVIDERS`` are the modules that register metrics or meters when they are imported.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Generic, Protocol, TypeVar

from outrider.core.errors import InvalidParameterError
from outrider.core.values import shown
from outrider.engine import Result
from outrider.lab.data import Example
from outrider.runtime import HFModel

PROVIDERS = ("outrider.lab.quality.metrics", "outrider.lab.energy.meters")


class Metric(Protocol):
    """Numbers about the outputs of one cell."""

    def __call__(
        self, examples: Sequence[Example], results: Sequence[Result], target: HFModel
    ) -> Mapping[str, Any]:
        """The metric's numbers by name, for JSON.

        Args:
            examples: one per output. An example of several turns stands here once per turn, with
                the conversation and the reference of that turn.
            results: the outputs, in the same order, of all repeats.
            target: the model whose outputs the lossless methods have.
        """
        ...


class Meter(Protocol):
    """Reads something while a repeat runs, such as an energy counter."""

    def begin(self) -> None:
        """Called immediately before the first request of a repeat is added."""

    def end(self) -> Mapping[str, Any]:
        """Called once the device has finished the last round; what was read, for JSON. A counter
        that fails reports so here and must not raise."""


@dataclass(frozen=True)
class MetricEntry:
    """A registered metric.

    Attributes:
        name: in plans.
        compute: the metric.
        needs_reference: whether every example needs a reference answer.
        needs_divergence: whether it reads the divergences in ``Result.stats``. The outputs that it
            gets then come from an additional run with ``measure=True``, which is not timed.
        check: called before anything is measured; raises OutriderError where the metric cannot be
            computed, for want of a package for example.
        check_example: called with each turn of each example before anything is measured; raises
            OutriderError where the metric cannot be computed of its outputs.
    """

    name: str
    compute: Metric
    needs_reference: bool = False
    needs_divergence: bool = False
    check: Callable[[], None] = lambda: None
    check_example: Callable[[Example], object] = lambda example: None


@dataclass(frozen=True)
class MeterEntry:
    """A registered meter.

    Attributes:
        name: in plans.
        open: makes the meter; raises OutriderError where it cannot work on this machine.
    """

    name: str
    open: Callable[[], Meter]


Entry = TypeVar("Entry", MetricEntry, MeterEntry)


class Registry(Generic[Entry]):
    """Entries by name.

    Args:
        what: how messages call an entry.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._entries: dict[str, Entry] = {}

    def add(self, entry: Entry) -> None:
        """Registers an entry; one of the same name is replaced."""
        self._entries[entry.name] = entry

    def find(self, name: str) -> Entry:
        """The entry of that name.

        Raises:
            InvalidParameterError: there is none; the message lists all names.
        """
        self._import_providers()
        if name in self._entries:
            return self._entries[name]
        near = difflib.get_close_matches(str(name), self._entries, n=1)
        hint = f"did you mean {near[0]!r}? " if near else ""
        known = ", ".join(self.names()) or "none is installed"
        raise InvalidParameterError(f"unknown {self._what} {shown(name)}: {hint}known: {known}")

    def names(self) -> list[str]:
        """All names, sorted."""
        self._import_providers()
        return sorted(self._entries)

    def _import_providers(self) -> None:
        for module in PROVIDERS:
            if find_spec(module) is not None:
                import_module(module)


METRICS: Registry[MetricEntry] = Registry("metric")
METERS: Registry[MeterEntry] = Registry("meter")


def metric(
    name: str,
    *,
    needs_reference: bool = False,
    needs_divergence: bool = False,
    check: Callable[[], None] = lambda: None,
    check_example: Callable[[Example], object] = lambda example: None,
) -> Callable[[Metric], Metric]:
    """Registers the decorated function as a metric; arguments as :class:`MetricEntry`."""

    def register(compute: Metric) -> Metric:
        METRICS.add(
            MetricEntry(name, compute, needs_reference, needs_divergence, check, check_example)
        )
        return compute

    return register


def meter(name: str) -> Callable[[Callable[[], Meter]], Callable[[], Meter]]:
    """Registers the decorated function or class, which makes a meter, under a name."""

    def register(open: Callable[[], Meter]) -> Callable[[], Meter]:
        METERS.add(MeterEntry(name, open))
        return open

    return register

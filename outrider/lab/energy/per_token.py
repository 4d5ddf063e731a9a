"""Joules per token of a cell, from the readings of its repeats."""

from collections.abc import Iterable
from dataclasses import dataclass

from outrider.lab.bench import Repeat


@dataclass(frozen=True)
class JoulesPerToken:
    """The energy of a cell by one meter, over the repeats in which the meter worked.

    Attributes:
        joules: per token of the outputs; None if the meter failed in all repeats.
        above_idle: the same without what the machine draws when idle; None where that is not known.
        estimate: whether it is an estimate instead of a measurement.
        errors: what failed, once per repeat in which the meter failed.
    """

    joules: float | None
    above_idle: float | None
    estimate: bool
    errors: tuple[str, ...]


def joules_per_token(repeats: Iterable[Repeat]) -> dict[str, JoulesPerToken]:
    """The energy of a cell by the name of the meter; meters of other things are left out."""
    readings: dict[str, list[tuple[int, dict[str, object]]]] = {}
    for repeat in repeats:
        for name, reading in repeat.readings.items():
            if "joules" in reading:
                readings.setdefault(name, []).append((repeat.tokens, dict(reading)))
    return {name: _of(each) for name, each in readings.items()}


def _of(readings: list[tuple[int, dict[str, object]]]) -> JoulesPerToken:
    return JoulesPerToken(
        _ratio(readings, "joules"),
        _ratio(readings, "joules_above_idle"),
        any(bool(reading.get("estimate")) for _, reading in readings),
        tuple(str(reading["error"]) for _, reading in readings if reading.get("error")),
    )


def _ratio(readings: list[tuple[int, dict[str, object]]], name: str) -> float | None:
    known = [
        (tokens, value)
        for tokens, reading in readings
        if isinstance(value := reading.get(name), int | float)
    ]
    tokens = sum(number for number, _ in known)
    return sum(value for _, value in known) / tokens if tokens else None

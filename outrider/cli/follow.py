"""Runs a request to its end, or to Ctrl-C, showing each event."""

from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.engine import Engine, Event, Result
    from outrider.sampling import Sampling

CANCELLED = "cancelled"


def follow(
    engine: "Engine",
    prompt: str,
    sampling: "Sampling",
    show: Callable[["Event"], None] | None = None,
) -> "Result":
    """The result; after Ctrl-C what there is so far, its ``finish_reason`` then ``cancelled``."""
    row = None
    try:
        for row in engine.run(prompt, sampling):
            if show is not None:
                show(row.event())
    except KeyboardInterrupt:
        if row is None:
            raise
    assert row is not None
    return row.result()


def warm_up(engine: "Engine", prompt: str, sampling: "Sampling") -> float:
    """Writes a few tokens that nobody sees, so that first-time costs are not timed; their speed."""
    from dataclasses import replace

    few = replace(sampling, max_new_tokens=min(16, sampling.max_new_tokens))
    return engine.generate(prompt, few).stats.tokens_per_second

"""Runs one request until it ends or the user presses Ctrl-C, and shows its events."""

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
    """Runs a request, passing each event to ``show``.

    Returns:
        The result. After Ctrl-C it holds the output so far, with ``finish_reason`` "cancelled".
    """
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
    """Generates a few tokens and discards them, so that later timings exclude one-time costs.

    Returns:
        Tokens per second of the discarded output.
    """
    from dataclasses import replace

    few = replace(sampling, max_new_tokens=min(16, sampling.max_new_tokens))
    return engine.generate(prompt, few).stats.tokens_per_second

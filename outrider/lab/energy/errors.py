"""Errors of power and energy counters."""

from outrider.core.errors import OutriderError


class CounterError(OutriderError):
    """A counter does not exist, cannot be read, or has vanished during a run."""

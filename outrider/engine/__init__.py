"""Requests in, outputs out: scheduling, batches, stops, streaming, statistics."""

from outrider.engine.engine import Engine
from outrider.engine.loading import load
from outrider.engine.request import Event, Request, Result, Results, Row, TopLogprobs
from outrider.engine.scheduler import Progress, Scheduler
from outrider.engine.speculation import Speculation
from outrider.engine.stats import Stats

__all__ = [
    "Engine",
    "Event",
    "Progress",
    "Request",
    "Result",
    "Results",
    "Row",
    "Scheduler",
    "Speculation",
    "Stats",
    "TopLogprobs",
    "load",
]

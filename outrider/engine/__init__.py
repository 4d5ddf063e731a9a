"""Requests in, outputs out: scheduling, batches, stops, streaming, statistics.

Names are imported when they are first used: a process that compiles begins without them.
"""

from typing import TYPE_CHECKING

from outrider.imports.lazy import lazy

if TYPE_CHECKING:
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

_HOME = {
    "Engine": "outrider.engine.engine",
    "Event": "outrider.engine.request",
    "Progress": "outrider.engine.scheduler",
    "Request": "outrider.engine.request",
    "Result": "outrider.engine.request",
    "Results": "outrider.engine.request",
    "Row": "outrider.engine.request",
    "Scheduler": "outrider.engine.scheduler",
    "Speculation": "outrider.engine.speculation",
    "Stats": "outrider.engine.stats",
    "TopLogprobs": "outrider.engine.request",
    "load": "outrider.engine.loading",
}

__getattr__, __dir__ = lazy(__name__, _HOME)

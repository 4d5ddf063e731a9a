"""Requests in, text out: admission, rounds, stops, streaming, statistics."""

from outrider.engine.engine import Engine
from outrider.engine.loading import load
from outrider.engine.request import Event, Request, Result, Results, Row, TopLogprobs
from outrider.engine.stats import Stats

__all__ = ["Engine", "Event", "Request", "Result", "Results", "Row", "Stats", "TopLogprobs", "load"]

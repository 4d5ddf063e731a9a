"""Records time spans of an engine by wrapping the methods of its parts for a while.

The engine has no profiling code of its own. Models are wrapped as objects, so each has its own
track. All other parts are wrapped as classes, so no other engine should run in the process
meanwhile.
"""

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial, wraps
from types import TracebackType
from typing import Any

from outrider.core import Context
from outrider.core.clock import Stopwatch
from outrider.engine import Engine, Row, running_batch
from outrider.engine.logprobs import Logprobs
from outrider.engine.running_batch import RunningBatch
from outrider.lab.profile.spans import SpanRecorder
from outrider.runtime import HFModel
from outrider.sampling import Warp

ENGINE, TARGET, DRAFT = "engine", "target", "draft"
Detail = Callable[..., dict[str, Any]]


def tracks(engine: Engine) -> dict[str, HFModel]:
    """The engine's models by the name of their track: the target, then the draft models."""
    drafts: tuple[HFModel, ...] = engine.drafter.capabilities.models
    names = [DRAFT] if len(drafts) == 1 else [f"{DRAFT} {i}" for i in range(1, len(drafts) + 1)]
    return {TARGET: engine.target, **dict(zip(names, drafts, strict=True))}


@contextmanager
def recorded(engine: Engine, recorder: SpanRecorder) -> Iterator[None]:
    """Records the engine's spans inside the ``with`` block, and restores all methods after it."""

    def timed(owner: Any, method: str, name: str, track: str, detail: Detail | None = None) -> None:
        stack.enter_context(
            _replaced(owner, method, lambda old: _timed(old, recorder, name, track, detail))
        )

    with ExitStack() as stack:
        timed(RunningBatch, "begin", "prefill", ENGINE)
        timed(RunningBatch, "prefill", "prefill", ENGINE)
        timed(RunningBatch, "step", "round", ENGINE)
        timed(RunningBatch, "_read", "device-to-host sync", ENGINE)
        timed(Row, "take", "take tokens", ENGINE)
        timed(running_batch, "measured_divergence", "divergence", ENGINE)
        timed(Logprobs, "of", "logprobs", ENGINE)
        timed(Context, "append", "append", ENGINE)
        timed(Warp, "__call__", "distribution", ENGINE)
        timed(Warp, "logits", "distribution", ENGINE)
        for rule in {type(engine.recipe.verifier), type(engine.recipe.greedy_verifier)}:
            timed(rule, "__call__", "rule", ENGINE)
        if engine.verification is not None:  # one compiled program computes the distributions too
            timed(type(engine.verification), "__call__", "rule", ENGINE)
        timed(type(engine.drafter), "propose", "propose", ENGINE)
        timed(type(engine.drafter), "commit", "draft commit", ENGINE)
        for track, model in tracks(engine).items():
            timed(model, "score", "score", track, _nodes)
            timed(model, "forward", "extend", track, _queries)
            timed(model, "draft", "extend", track, _fused_draft)
            timed(model, "draft_by", "extend", track, _planned_draft)
            timed(model, "commit", "commit", track)
            stopwatch = partial(_RecordingStopwatch, recorder=recorder, track=track)
            stack.enter_context(_replaced(model, "watch", stopwatch))
        yield


class _RecordingStopwatch(Stopwatch):
    """Wraps a model's stopwatch and records a span for each forward pass."""

    def __init__(self, watch: Stopwatch, recorder: SpanRecorder, track: str) -> None:
        self._watch, self._recorder, self._track = watch, recorder, track

    def __enter__(self) -> None:
        self._recorder.begin("pass", self._track)
        self._watch.__enter__()

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._watch.__exit__(kind, error, trace)
        self._recorder.end()

    def seconds(self) -> float:
        return self._watch.seconds()


def _timed(
    call: Callable[..., Any], recorder: SpanRecorder, name: str, track: str, detail: Detail | None
) -> Callable[..., Any]:
    @wraps(call)
    def timed(*args: Any, **kwargs: Any) -> Any:
        recorder.begin(name, track, detail(*args) if detail is not None else None)
        try:
            return call(*args, **kwargs)
        finally:
            recorder.end()

    return timed


@contextmanager
def _replaced(owner: Any, name: str, change: Callable[[Any], Any]) -> Iterator[None]:
    """Replaces an attribute of an object, a class or a module inside the ``with`` block."""
    missing = object()
    before = vars(owner).get(name, missing)  # getattr would bind a classmethod
    setattr(owner, name, change(getattr(owner, name)))
    try:
        yield
    finally:
        if before is missing:
            delattr(owner, name)
        else:
            setattr(owner, name, before)


def _nodes(cache: Any, draft: Any) -> dict[str, Any]:
    return {"nodes": draft.num_nodes, "chain": draft.is_chain}


def _fused_draft(cache: Any, tokens_BN: Any, depth: int, *rest: Any) -> dict[str, Any]:
    """Mean tokens per pass of a fused draft, whose passes after the first have one token each."""
    tokens = (tokens_BN.shape[1] + depth - 1) / depth
    return {"tokens": tokens, "context": max(cache.lengths), "passes": depth}


def _planned_draft(
    plan: Any, cache: Any, tokens_BN: Any, parameters: Any, *rest: Any
) -> dict[str, Any]:
    """Mean tokens per pass of a fused draft of any plan."""
    widths = [tokens_BN.shape[1], *plan.widths(sampled=parameters is not None)]
    mean = sum(widths) / len(widths)
    return {"tokens": mean, "context": max(cache.lengths), "passes": len(widths)}


def _queries(batch: Any) -> dict[str, Any]:
    return {"tokens": batch.tokens_BN.shape[1], "context": max(batch.cache.lengths)}

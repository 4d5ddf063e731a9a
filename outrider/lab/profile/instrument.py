"""Times an engine from outside: for a while, its parts' methods record a span around each call.

The engine knows nothing of it, and has no switch for it. Models are told apart, so each is timed by
itself; everything else by its class, so nothing else should generate in this process meanwhile.
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
from outrider.engine.running_batch import RunningBatch, models_of
from outrider.lab.profile.spans import Recorder
from outrider.runtime import HFModel
from outrider.sampling import Warp

ENGINE, TARGET, DRAFT = "engine", "target", "draft"
Detail = Callable[..., dict[str, Any]]


def tracks(engine: Engine) -> dict[str, HFModel]:
    """The engine's models by the name of their track: the target, then those that draft."""
    drafts = models_of(engine.drafter)
    names = [DRAFT] if len(drafts) == 1 else [f"{DRAFT} {i}" for i in range(1, len(drafts) + 1)]
    return {TARGET: engine.target, **dict(zip(names, drafts, strict=True))}


@contextmanager
def recorded(engine: Engine, recorder: Recorder) -> Iterator[None]:
    """While it lasts, what the engine does is recorded; afterwards all is as before."""

    def timed(owner: Any, method: str, name: str, track: str, detail: Detail | None = None) -> None:
        stack.enter_context(
            _replaced(owner, method, lambda old: _timed(old, recorder, name, track, detail))
        )

    with ExitStack() as stack:
        timed(RunningBatch, "admit", "prefill", ENGINE)
        timed(RunningBatch, "step", "round", ENGINE)
        timed(RunningBatch, "_read", "read", ENGINE)
        timed(Row, "take", "text", ENGINE)
        timed(running_batch, "measured_divergence", "divergence", ENGINE)
        timed(Logprobs, "of", "logprobs", ENGINE)
        timed(Context, "append", "append", ENGINE)
        timed(Warp, "__call__", "distribution", ENGINE)
        timed(Warp, "logits", "distribution", ENGINE)
        for rule in {type(engine.recipe.verifier), type(engine.recipe.greedy_verifier)}:
            timed(rule, "__call__", "rule", ENGINE)
        if engine.verification is not None:  # verifies by one program, distributions included
            timed(type(engine.verification), "__call__", "rule", ENGINE)
        timed(type(engine.drafter), "propose", "propose", ENGINE)
        timed(type(engine.drafter), "commit", "draft commit", ENGINE)
        for track, model in tracks(engine).items():
            timed(model, "score", "score", track, _nodes)
            timed(model, "forward", "extend", track, _queries)
            timed(model, "draft", "extend", track, _whole)
            timed(model, "commit", "commit", track)
            watch = partial(_Watch, recorder=recorder, track=track)
            stack.enter_context(_replaced(model, "watch", watch))
        yield


class _Watch(Stopwatch):
    """A model's own stopwatch, which also records a span for each forward pass."""

    def __init__(self, watch: Stopwatch, recorder: Recorder, track: str) -> None:
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
    call: Callable[..., Any], recorder: Recorder, name: str, track: str, detail: Detail | None
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
    """An attribute of an object, a class or a module that is another for a while."""
    missing = object()
    before = vars(owner).get(name, missing)  # as it is stored: a classmethod is no bound method
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


def _whole(cache: Any, tokens_BN: Any, depth: int, *rest: Any) -> dict[str, Any]:
    """Of a whole draft: its passes have a token each but for the first."""
    tokens = (tokens_BN.shape[1] + depth - 1) / depth
    return {"tokens": tokens, "context": max(cache.lengths), "passes": depth}


def _queries(batch: Any) -> dict[str, Any]:
    return {"tokens": batch.tokens_BN.shape[1], "context": max(batch.cache.lengths)}

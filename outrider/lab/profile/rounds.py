"""Rounds of one sequence: timed by the method and by plain decoding, and recorded."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.core.errors import PromptError
from outrider.engine import Engine, Stats
from outrider.lab.profile.instrument import recorded
from outrider.lab.profile.spans import SpanRecorder
from outrider.sampling import Sampling


@dataclass(frozen=True)
class Run:
    """Timed rounds of one sequence, without its first round.

    Attributes:
        rounds: number of timed rounds.
        tokens: emitted in them.
        seconds: that they took.
        token_ids: of the whole output.
        stats: of the whole output.
    """

    rounds: int
    tokens: int
    seconds: float
    token_ids: tuple[int, ...]
    stats: Stats

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def generate_rounds(engine: Engine, prompt: Sequence[int], sampling: Sampling, rounds: int) -> Run:
    """Runs the engine for one untimed round and then up to ``rounds`` timed ones.

    Raises:
        PromptError: the context has no room for two rounds after the prompt.
    """
    enough = (rounds + 2) * (engine.num_speculative_tokens + 1)  # so that no draft is cut short
    sampling = replace(sampling, max_new_tokens=min(enough, engine.limit))
    began, first, num = 0.0, 0, 0
    for row in engine.run(prompt, sampling):
        if num == 0:
            began, first = time.perf_counter(), len(row.token_ids)
        num += 1
        if num > rounds or row.finished:
            break
    seconds = time.perf_counter() - began
    if num < 2:
        raise PromptError(
            f"the prompt has {len(prompt)} tokens, the context {engine.limit}, which leaves no "
            f"room for two rounds: shorten the prompt"
        )
    ids = tuple(row.token_ids)
    return Run(num - 1, len(ids) - first, seconds, ids, row.stats)


@dataclass(frozen=True)
class InterleavedRuns:
    """Repeated runs on the same prompt.

    Attributes:
        method: timed runs of the method.
        plain: timed runs of plain decoding over as many tokens; empty if the method is plain.
        recorders: spans of further runs of the method.
    """

    method: list[Run]
    plain: list[Run]
    recorders: list[SpanRecorder]


def interleave(
    engine: Engine,
    plain: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    rounds: int,
    repeats: int,
    new_recorder: Callable[[], SpanRecorder],
) -> InterleavedRuns:
    """Alternates the method, plain decoding, and the method with recording.

    Alternating keeps a drift of the machine's speed from favouring one of them. The first runs of
    the method and of plain decoding are warm-up and are dropped.
    """
    runs = InterleavedRuns([], [], [])
    for repeat in range(repeats + 1):
        runs.method.append(generate_rounds(engine, prompt, sampling, rounds))
        if engine.method.name != "plain":
            runs.plain.append(generate_rounds(plain, prompt, sampling, runs.method[-1].tokens))
        if repeat:
            runs.recorders.append(new_recorder())
            with recorded(engine, runs.recorders[-1]):
                generate_rounds(engine, prompt, sampling, rounds)
    return InterleavedRuns(runs.method[1:], runs.plain[1:], runs.recorders)

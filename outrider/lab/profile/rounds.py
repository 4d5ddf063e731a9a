"""Rounds of one text: timed as a whole, by the method and by plain decoding, and recorded."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.core.errors import PromptError
from outrider.engine import Engine, Stats
from outrider.lab.profile.instrument import recorded
from outrider.lab.profile.spans import Recorder
from outrider.methods import METHODS
from outrider.sampling import Sampling


@dataclass(frozen=True)
class Run:
    """Rounds of one text, the first one not counted."""

    rounds: int
    tokens: int
    seconds: float
    token_ids: tuple[int, ...]
    stats: Stats

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / self.seconds


def write(engine: Engine, prompt: Sequence[int], sampling: Sampling, rounds: int) -> Run:
    """Lets the engine write so many rounds and one more before them."""
    most = (rounds + 2) * (engine.num_speculative_tokens + 1)  # so that no draft is cut short
    sampling = replace(sampling, max_new_tokens=min(most, engine.limit))
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
class Turns:
    """The same text again and again, as many tokens each time.

    Attributes:
        method: rounds of the method.
        plain: plain decoding; empty beside plain.
        recorders: of the method's rounds again, recorded.
    """

    method: list[Run]
    plain: list[Run]
    recorders: list[Recorder]


def take_turns(
    engine: Engine,
    prompt: Sequence[int],
    sampling: Sampling,
    rounds: int,
    repeats: int,
    new_recorder: Callable[[], Recorder],
) -> Turns:
    """Method, plain decoding and the method recorded take turns, so that a machine whose speed
    drifts favours none. The first turn of the first two warms up."""
    plain = Engine(
        engine.target,
        None,
        METHODS["plain"],
        num_speculative_tokens=1,
        max_batch_size=1,
        generation_config=engine.generation_config,
    )
    turns = Turns([], [], [])
    for repeat in range(repeats + 1):
        turns.method.append(write(engine, prompt, sampling, rounds))
        if engine.method.name != "plain":
            turns.plain.append(write(plain, prompt, sampling, turns.method[-1].tokens))
        if repeat:
            turns.recorders.append(new_recorder())
            with recorded(engine, turns.recorders[-1]):
                write(engine, prompt, sampling, rounds)
    return Turns(turns.method[1:], turns.plain[1:], turns.recorders)

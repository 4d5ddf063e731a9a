"""Rounds of a full batch: set acceptance, their time, and the bytes that they must read.

Acceptance is *set* by a rule that accepts each token with a given probability, whatever the target
predicts; vLLM has such a mode. The output is meaningless, but a round does all the work of a greedy
round. (The method ``synthetic`` keeps the target's output, which it has recorded in an earlier run.
In bfloat16, a wider pass rounds differently, so the output differs from the recorded one every few
tokens for a random model, and occasionally for a trained one.)

Legend: B rows, N nodes (node 0 is the root), D drafted tokens (N-1).
"""

import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import torch
from torch import Tensor

from outrider import Engine, Sampling, Stats
from outrider.core import (
    Bound,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Needs,
    Stream,
    Verdict,
    match,
)
from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.none import NoDraft, NoState
from outrider.engine.request import Request, Row
from outrider.engine.running_batch import RunningBatch
from outrider.engine.stop import Ending
from outrider.lab.profile.floor import weight_bytes
from outrider.lab.profile.instrument import recorded, tracks
from outrider.lab.profile.phases import Phases
from outrider.lab.profile.spans import SpanRecorder
from outrider.methods import Method
from outrider.runtime import HFModel
from outrider.runtime.kv_cache.footprint import Footprint

WARM_UP = 8
"""Rounds in which CUDA graphs are captured."""


_SUMMED, _SPREAD = 64, 1e3
"""Logits that are summed, and what turns their sum into a number whose fraction is uniform."""


@dataclass(frozen=True)
class Chance:
    """Accepts each drafted token with the same probability, until the first rejection. A fraction
    of logits takes the place of a random number, so that the rule has a program."""

    acceptance: float = 0.8
    lossless: ClassVar[bool] = False
    traceable: ClassVar[bool] = True
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "argmax"
    bound: ClassVar[Bound] = Bound("nothing: an instrument")

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        u_BD = (_SPREAD * p_BNV[:, :-1, :_SUMMED].float().sum(-1)).abs().frac()
        return match(draft, u_BD < self.acceptance, p_BNV.argmax(-1))


class Free(NoDraft):
    """Drafts copies of the root, which takes no time."""

    capabilities = Capabilities(rewindable=True)

    def propose(self, state: NoState, context: Context, budget: Budget, rng: Stream) -> Draft:
        tokens_BN = context.root_B[:, None].repeat(1, budget.max_tokens + 1)
        return Draft.chain(tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool), None, "chosen")


FREE = Method(
    "free",
    "A draft without any draft model.",
    "an instrument",
    "nothing",
    Chance,
    lambda parts: Free(),
)


@dataclass(frozen=True)
class Rounds:
    """Timed rounds of a full batch.

    Attributes:
        seconds: of each round.
        tokens: emitted by all rows.
        stats: of all rows, rounds of warm-up included.
    """

    seconds: tuple[float, ...]
    tokens: int
    stats: Stats

    @property
    def speed(self) -> float:
        """Tokens per second."""
        return self.tokens / sum(self.seconds)

    @property
    def each(self) -> float:
        """Median seconds of a round."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Work:
    """An engine with the prompts of its batch.

    Attributes:
        engine: runs the rounds.
        prompts: token ids, one list per row.
        temperature: of all rows.
    """

    engine: Engine
    prompts: Sequence[Sequence[int]]
    temperature: float = 0.0

    def started(self) -> RunningBatch:
        """The batch after prefill and a few rounds of warm-up."""
        engine = self.engine
        recipe = engine.recipe
        running = RunningBatch(
            engine.target,
            engine.drafter,
            lambda greedy: recipe.greedy_verifier if greedy else recipe.verifier,
            engine.num_speculative_tokens,
            measure=False,
            verification=engine.verification,
        )
        sampling = Sampling(
            temperature=self.temperature, max_new_tokens=engine.limit, ignore_eos=True
        )
        rows = []
        for number, prompt in enumerate(map(tuple, self.prompts)):
            ending = Ending(sampling, (), engine.limit - len(prompt), None)
            rows.append(Row(Request(prompt, prompt, sampling, number), ending))
        running.admit(rows)
        for _ in range(WARM_UP):
            self.step(running)
        return running

    def step(self, running: RunningBatch) -> None:
        """Runs a round of all rows.

        Raises:
            InvalidParameterError: the context of a row is full.
        """
        running.step()
        if any(row.finished for row in running.rows):
            raise InvalidParameterError(
                f"the context of {self.engine.limit} tokens is full: ask for fewer rounds, or for "
                f"a smaller γ"
            )

    def timed(self, rounds: int) -> Rounds:
        """Times rounds, each until the device has finished."""
        running = self.started()
        seconds, before = [], sum(len(row.token_ids) for row in running.rows)
        for _ in range(rounds):
            began = time.perf_counter()
            self.step(running)
            seconds.append(time.perf_counter() - began)
        tokens = sum(len(row.token_ids) for row in running.rows) - before
        stats = Stats.total(row.stats for row in running.rows)
        running.close()
        return Rounds(tuple(seconds), tokens, stats)

    def phases(self, rounds: int) -> Phases:
        """Records rounds by phase.

        The host synchronises with the device around each span. That gives the device's time, but
        makes rounds slower than usual.
        """
        running, device = self.started(), self.engine.target.device
        wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
        recorder = SpanRecorder(wait=wait)
        with recorded(self.engine, recorder):
            for _ in range(rounds):
                self.step(running)
        running.close()
        return Phases.of(recorder.spans)

    def floor(self, phases: Phases, bandwidth: float) -> dict[str, float]:
        """Least seconds of a pass of each model, by the weights, keys and values that it reads."""
        found = {}
        for track, model in tracks(self.engine).items():
            if track in phases.passes:
                passes = phases.passes[track]
                rows = len(self.prompts)
                num_bytes = weight_bytes(model.module, max(1, round(rows * passes.tokens)))
                num_bytes += round(rows * passes.context * slot_bytes(model))
                found[track] = num_bytes / bandwidth
        return found


def slot_bytes(model: HFModel) -> int:
    """Bytes of the keys and values of one token."""
    return Footprint.of(model).slot

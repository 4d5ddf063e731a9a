"""Rounds of a full batch: what they are verified by, how long they take, what they must read.

A rate of acceptance is *set* by a rule that accepts each token with that probability, whatever the
target thinks of it; vLLM has such a mode. The text is then nobody's, but a round does all the work
of a greedy one. (The method ``synthetic`` keeps to the target's text, which it remembers from an
earlier run. In bfloat16 a pass over more tokens rounds otherwise, so every few tokens the text of a
random model, and once in a while that of a trained one, parts from the remembered one.)

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
    Role,
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
from outrider.lab.profile.spans import Recorder
from outrider.methods import Method
from outrider.runtime import HFModel
from outrider.runtime.kv_cache.footprint import Footprint

WARM_UP = 3


@dataclass(frozen=True)
class Chance:
    """Accepts each drafted token with the same probability, until the first refusal."""

    acceptance: float = 0.8
    lossless: ClassVar[bool] = False
    accepts: ClassVar[frozenset[Drawn]] = frozenset({"iid", "chosen"})
    needs: ClassVar[Needs] = "argmax"
    bound: ClassVar[Bound] = Bound("nothing: an instrument")

    def __call__(self, draft: Draft, p_BNV: Tensor, rng: Stream) -> Verdict:
        fits_BD = rng.uniform(Role.ACCEPT, draft.num_nodes - 1) < self.acceptance
        return match(draft, fits_BD, p_BNV.argmax(-1))


class Free(NoDraft):
    """Drafts the root again and again, which takes no time."""

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
    """Rounds of a batch in which all rows took part.

    Attributes:
        seconds: of each.
        tokens: emitted, of all rows.
        stats: of all rows, the rounds before these included.
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
        """Seconds of a round, the median."""
        return statistics.median(self.seconds)


@dataclass(frozen=True)
class Work:
    """An engine and what it continues.

    Attributes:
        engine: whose rounds.
        prompts: token ids, one list per row.
        temperature: of all rows.
    """

    engine: Engine
    prompts: Sequence[Sequence[int]]
    temperature: float = 0.0

    def started(self) -> RunningBatch:
        """The batch behind its prefill and a few rounds that are not counted."""
        engine = self.engine
        recipe = engine.recipe
        slots = RunningBatch(
            engine.target,
            engine.drafter,
            lambda greedy: recipe.greedy_verifier if greedy else recipe.verifier,
            engine.num_speculative_tokens,
            measure=False,
        )
        sampling = Sampling(
            temperature=self.temperature, max_new_tokens=engine.limit, ignore_eos=True
        )
        rows = []
        for number, prompt in enumerate(map(tuple, self.prompts)):
            ending = Ending(sampling, (), engine.limit - len(prompt), None)
            rows.append(Row(Request(prompt, prompt, sampling, number), ending))
        slots.admit(rows)
        for _ in range(WARM_UP):
            self.step(slots)
        return slots

    def step(self, slots: RunningBatch) -> None:
        """A round of all rows.

        Raises:
            InvalidParameterError: a row has no room for another one.
        """
        slots.step()
        if any(row.finished for row in slots.rows):
            raise InvalidParameterError(
                f"the context of {self.engine.limit} tokens is full: ask for fewer rounds, or for "
                f"a smaller γ"
            )

    def timed(self, rounds: int) -> Rounds:
        """So many rounds, each until the device has done its part."""
        slots = self.started()
        seconds, before = [], sum(len(row.token_ids) for row in slots.rows)
        for _ in range(rounds):
            began = time.perf_counter()
            self.step(slots)
            seconds.append(time.perf_counter() - began)
        tokens = sum(len(row.token_ids) for row in slots.rows) - before
        stats = Stats.total(row.stats for row in slots.rows)
        slots.close()
        return Rounds(tuple(seconds), tokens, stats)

    def phases(self, rounds: int) -> Phases:
        """The passes in so many rounds; the device is waited for around each, so that its time is
        known, and rounds take longer than they do."""
        slots, device = self.started(), self.engine.target.device
        wait = partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
        recorder = Recorder(wait=wait)
        with recorded(self.engine, recorder):
            for _ in range(rounds):
                self.step(slots)
        slots.close()
        return Phases.of(recorder.spans)

    def floor(self, phases: Phases, bandwidth: float) -> dict[str, float]:
        """Least seconds of a pass of each model, by what it reads: weights, keys and values."""
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

"""A drafter that declares hidden layers gets those of the prompts, pass by pass of the prefill.

Legend: B rows, N query tokens, H hidden width.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from tiny_models import VOCAB, engine_of, greedy, ragged_prompts, tiny
from torch import Tensor

from outrider import Sampling
from outrider.core import (
    Acceptance,
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Scores,
    Stream,
    prompt_reader,
    start_batch,
)
from outrider.core.errors import IncompatibleError
from outrider.drafters.chain.draft_length import HeuristicLength
from outrider.drafters.chain.none import NoDraft
from outrider.drafters.within_context import WithinContext
from outrider.methods import Method
from outrider.runtime import HFModel, prefill
from outrider.sampling import Warp
from outrider.testing import SoftmaxDistribution
from outrider.verifiers import Rejection

LAYERS = (1, 2)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
PROMPTS = ragged_prompts([9, 3, 1, 6])


@dataclass
class Read:
    """What was read of each row, one tensor (N, H) per forward pass."""

    rows: list[list[Tensor]]

    def keep(self, rows: Sequence[int]) -> None:
        self.rows = [self.rows[row] for row in rows]


class Reader:
    """Reads hidden states and drafts nothing."""

    drawn: Drawn = "chosen"
    capabilities: Capabilities[HFModel] = Capabilities(hidden_layers=LAYERS)

    def __init__(self) -> None:
        self.joined: list[list[Tensor]] = []

    def start(self, context: Context) -> Read:
        return Read([[] for _ in range(context.num_rows)])

    def read_prompt(self, state: Read, context: Context, hidden_BNH: Tensor, first: int) -> None:
        assert len(hidden_BNH) == len(state.rows) == context.num_rows
        for hidden_NH, row in zip(hidden_BNH, state.rows, strict=True):
            assert sum(len(part) for part in row) == first
            row.append(hidden_NH)

    def propose(self, state: Read, context: Context, budget: Budget, rng: Stream) -> Draft:
        self.joined = state.rows
        return Draft.root_only(context.root_B)

    def commit(self, state: Read, draft: Draft, verdict: Acceptance, scores: Scores) -> None:
        assert scores.hidden_BNH is not None

    def join(self, state: Read, other: Read) -> None:
        state.rows += other.rows


def reading(reader: Reader) -> Method:
    return Method("reader", "Reads.", "tests", "nothing", Rejection, lambda parts: reader)


def expected(model: HFModel, prompt: list[int]) -> Tensor:
    """As ``transformers`` returns them, of all tokens but the last, (N, H)."""
    found = model.module(torch.tensor([prompt]), use_cache=False, output_hidden_states=True)
    return torch.cat([found.hidden_states[layer][0, :-1] for layer in LAYERS], -1)


@torch.inference_mode()
def check_rows(found: list[list[Tensor]], model: HFModel, prompts: list[list[int]]) -> None:
    assert len(found) == len(prompts)
    for parts, prompt in zip(found, prompts, strict=True):
        num = len(prompt) - 1
        hidden_NH = torch.cat(parts)[:num] if num else torch.empty(0, 64)
        torch.testing.assert_close(hidden_NH, expected(model, prompt), **CLOSE)


@pytest.fixture(autouse=True)
def narrow_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "PREFILL_WIDTH", 4)


def test_every_pass_is_read_in_order() -> None:
    model, reader = tiny(), Reader()
    engine_of(model, None, reading(reader)).generate(PROMPTS, greedy(2))
    check_rows(reader.joined, model, sorted(PROMPTS, key=len, reverse=True))
    assert [len(part) for part in reader.joined[0]] == [4, 4]


def test_a_row_that_leaves_between_two_passes_is_forgotten() -> None:
    model, reader = tiny(), Reader()
    context = Context.start(PROMPTS, SoftmaxDistribution(), [0] * 4, range(4))
    state = reader.start(context)
    running = model.with_hidden_states(LAYERS).begin(context, prompt_reader(reader, state, context))
    with torch.inference_mode():
        running.step()
        for each in (running.cache, state, context):
            each.keep([0, 2, 3])
        running.finish()
    check_rows(state.rows, model, [PROMPTS[0], PROMPTS[2], PROMPTS[3]])


@torch.inference_mode()
@pytest.mark.parametrize("wrapped", ["heuristic", "short context"])
def test_wrappers_hand_them_on(wrapped: str) -> None:
    """A drafter with a context of 6 tokens gets those of the rows that fit."""
    model, reader = tiny(), Reader()
    outer: Any = HeuristicLength(reader) if wrapped == "heuristic" else WithinContext(reader, 6, 6)
    context = Context.start(PROMPTS, Warp([Sampling()] * 4, VOCAB), [0] * 4, range(4))
    target = model.with_hidden_states(outer.capabilities.hidden_layers)
    _, state = start_batch(context, target, outer)
    outer.propose(state, context, Budget(1), context.rng)
    fitting = [prompt for prompt in PROMPTS if len(prompt) < 6 or wrapped == "heuristic"]
    check_rows(reader.joined, model, fitting)


class Deaf(NoDraft):
    """Declares hidden layers, and has no way to read them."""

    capabilities: Capabilities[HFModel] = Capabilities(hidden_layers=LAYERS)  # type: ignore[assignment]


def test_a_drafter_that_declares_layers_but_reads_none_is_refused() -> None:
    context = Context.start(PROMPTS, SoftmaxDistribution(), [0] * 4, range(4))
    with pytest.raises(IncompatibleError, match="Deaf declares hidden_layers but has no read_prom"):
        start_batch(context, tiny().with_hidden_states(LAYERS), Deaf())

"""Prompts are read in chunks between the rounds of running requests."""

from typing import Any, NamedTuple

import pytest
import torch
from scheduled_requests import DRAFT, PROMPTS, TARGET, alone, engine, finish
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Engine
from outrider.engine import Row
from outrider.engine import scheduler as scheduling
from outrider.runtime import prefill


@pytest.fixture
def narrow(monkeypatch: pytest.MonkeyPatch) -> int:
    """Passes of 8 tokens, two of them per step; the bound."""
    monkeypatch.setattr(prefill, "PREFILL_WIDTH", 8)
    monkeypatch.setattr(scheduling, "PREFILL_WIDTH", 8)
    monkeypatch.setattr(scheduling, "PROMPT_TOKENS_PER_STEP", 16)
    return 16


@pytest.mark.parametrize(
    ("method", "settings"),
    [
        ("plain", {}),
        ("speculative", {}),
        ("speculative", {"draft_length": "heuristic"}),
        ("dynamic-tree", {}),
        ("mtad", {}),
        ("staged", {}),
        ("hybrid", {}),
        ("early-exit", {}),
    ],
    ids=str,
)
def test_a_long_prompt_is_prefilled_between_rounds(
    method: str, settings: dict[str, Any], narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No step reads more than the bound with target and draft models together, running rows have a
    round in each, and every output is the one of the same passes without a round in between."""
    model = tiny(dtype=torch.float64, std=0.2, num_hidden_layers=3)
    drafts = method not in ("plain", "early-exit")
    each = engine_of(model, DRAFT if drafts else None, method, **settings)
    long, short = ragged_prompts([70, 5], seed=1)
    wanted = alone(each, [short, long], greedy(40))
    target, draft, steps = run_between_rounds(each, short, long, narrow, monkeypatch)
    assert target == len(long) - 1
    assert draft == (len(long) - 1 if drafts else 0)
    assert steps.before_joining >= (target + draft) // narrow
    assert steps.outputs == wanted


def test_a_short_draft_context_is_prefilled_between_rounds(
    narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wrapper of a draft model with a shorter context hands its prefills on."""
    draft = tiny(dtype=torch.float64, std=0.18, max_position_embeddings=90)
    each = engine_of(TARGET, draft)
    long, short = ragged_prompts([70, 5], seed=1)
    wanted = alone(each, [short, long], greedy(40))
    _, read, steps = run_between_rounds(each, short, long, narrow, monkeypatch)
    assert read == len(long) - 1
    assert steps.outputs == wanted


def test_a_row_leaves_in_the_middle_of_the_draft_models_prefill(narrow: int) -> None:
    """Whatever wraps the draft model, the other newcomers go on."""
    short_context = tiny(dtype=torch.float64, std=0.18, max_position_embeddings=90)
    engines = [
        engine(),
        engine(draft_length="heuristic"),
        engine("staged"),
        engine("hybrid"),
        engine_of(TARGET, short_context),
    ]
    prompts = ragged_prompts([5, 30, 25], seed=3)
    samplings = [greedy(80), greedy(9), greedy(9)]
    for each in engines:
        wanted = token_ids(each.generate(prompts, samplings))
        scheduler = each.new_scheduler()
        ids = [scheduler.add(each.request(prompts[0], samplings[0]))]
        scheduler.step()
        ids += [scheduler.add(each.request(prompts[i], samplings[i])) for i in (1, 2)]
        (batch,) = scheduler.batches
        for _ in range(5):  # four passes of the target's, and one of the draft model's
            scheduler.step()
        newcomers = batch._newcomers
        assert newcomers is not None
        assert newcomers._drafting is not None
        assert not newcomers.are_ready
        scheduler.abort(ids[1])
        rows = finish(scheduler, 2)
        assert [tuple(rows[i].token_ids) for i in (ids[0], ids[2])] == [wanted[0], wanted[2]]


class Steps(NamedTuple):
    """What was seen while a long prompt arrived.

    Attributes:
        before_joining: steps between the arrival and the first round with the new row.
        outputs: of both requests.
    """

    before_joining: int
    outputs: list[tuple[int, ...]]


def run_between_rounds(
    each: Engine, short: list[int], long: list[int], bound: int, monkeypatch: pytest.MonkeyPatch
) -> tuple[int, int, Steps]:
    """Lets a long prompt arrive while a short one runs, and checks that no step reads more prompt
    tokens than the bound, and that the running row has a round in every step.

    Returns:
        Tokens of the long prompt that the target and that other models read, and the steps.
    """
    read = {"target": 0, "draft": 0}
    in_step: list[int] = []
    step = prefill.Prefill.step

    def noting(self: prefill.Prefill) -> None:
        num_tokens = self.next_width * self.cache.num_rows
        read["target" if self._model is each.target else "draft"] += num_tokens
        in_step.append(num_tokens)
        step(self)

    scheduler = each.new_scheduler()
    ids = [scheduler.add(each.request(short, greedy(40)))]
    scheduler.step()
    monkeypatch.setattr(prefill.Prefill, "step", noting)
    ids.append(scheduler.add(each.request(long, greedy(40))))
    outputs: dict[int, tuple[int, ...]] = {}
    before_joining = 0
    while len(outputs) < 2:
        in_step.clear()
        progress = scheduler.step()
        assert sum(in_step) <= bound
        before_joining += ids[1] not in [p.request_id for p in progress] and not outputs
        assert ids[0] in [p.request_id for p in progress] or ids[0] in outputs
        outputs |= {p.request_id: tuple(p.row.token_ids) for p in progress if p.row.over}
    return read["target"], read["draft"], Steps(before_joining, [outputs[i] for i in ids])


def test_newcomers_share_passes_within_the_bound(
    narrow: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the order of short and long prompts."""
    each = engine("plain")
    read: list[int] = []
    step = prefill.Prefill.step

    def noting(self: prefill.Prefill) -> None:
        read.append(self.next_width * self.next_rows)
        step(self)

    monkeypatch.setattr(prefill.Prefill, "step", noting)
    scheduler = each.new_scheduler()
    scheduler.add(each.request(PROMPTS[0], greedy(60)))
    scheduler.step()
    for prompt in ragged_prompts([3, 40, 2, 2, 2, 2, 2, 2, 30, 4], seed=4):
        scheduler.add(each.request(prompt, greedy(2)))
    over = 0
    while over < 10:
        read.clear()
        over += sum(progress.row.over for progress in scheduler.step())
        assert sum(read) <= narrow


def test_chunks_are_bit_identical_to_one_prefill(narrow: int) -> None:
    """Float32: the keys and values of a prompt read pass by pass, with rounds in between, are
    exactly those of ``start``."""
    model = tiny(dtype=torch.float32, std=0.2)
    each = engine_of(model)
    long, short = ragged_prompts([60, 5], seed=2)
    scheduler = each.new_scheduler()
    scheduler.add(each.request(short, greedy(60)))
    scheduler.step()
    scheduler.add(each.request(long, greedy(1)))
    (batch,) = scheduler.batches
    while not batch.newcomers:
        scheduler.step()
    newcomers = batch._newcomers
    assert newcomers is not None
    whole = model.start(newcomers.context)
    while not newcomers.are_ready:
        scheduler.step()
    for ours, theirs in zip(newcomers._prefill.finish().in_use(), whole.in_use(), strict=True):
        assert torch.equal(ours[:, :, :59], theirs[:, :, :59])


def test_a_newcomer_is_aborted_in_the_middle_of_its_prefill(narrow: int) -> None:
    each = engine()
    prompts = ragged_prompts([5, 60, 50], seed=3)
    wanted = alone(each, prompts, greedy(30))
    scheduler = each.new_scheduler()
    ids = [scheduler.add(each.request(prompts[0], greedy(30)))]
    scheduler.step()
    ids += [scheduler.add(each.request(prompt, greedy(30))) for prompt in prompts[1:]]
    scheduler.step()
    (batch,) = scheduler.batches
    assert len(batch.newcomers) == 2
    scheduler.abort(ids[1])
    assert [list(row.request.prompt_ids) for row in batch.newcomers] == [prompts[2]]
    rows = finish(scheduler, 2)
    assert [tuple(rows[i].token_ids) for i in (ids[0], ids[2])] == [wanted[0], wanted[2]]


def test_short_prompts_do_not_wait(rounds: list[list[Row]]) -> None:
    """Within the bound on prompt tokens a request joins in the step that admits it."""
    each = engine()
    scheduler = each.new_scheduler()
    for num, prompt in enumerate(PROMPTS[:4], 1):
        scheduler.add(each.request(prompt, greedy(50)))
        scheduler.step()
        assert len(rounds[-1]) == num

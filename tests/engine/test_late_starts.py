"""Draft models that read prompts late: where drafting is not expected to pay, a request costs them
nothing."""

from typing import Any

import pytest
import torch
from scheduled_requests import finish
from simulated_rounds import Machine, Simulation, constant
from tiny_models import engine_of, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.governor.governor import START_SHARE
from outrider.engine.governor.outcomes import Asked
from outrider.engine.governor.row_memory import RowMemory
from outrider.runtime import HFModel

TARGET = tiny(dtype=torch.float64, std=0.2)
DRAFT = tiny(dtype=torch.float64, seed=0, std=0.19)
PROMPTS = ragged_prompts([70, 1, 9, 30])
AUTO: Any = "auto"


@pytest.fixture
def passes(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The names of the models that ran, pass by pass."""
    ran: list[str] = []
    forward = HFModel.forward

    def counting(self: HFModel, batch: Any) -> Any:
        ran.append(self.name)
        return forward(self, batch)

    monkeypatch.setattr(HFModel, "forward", counting)
    return ran


def script(monkeypatch: pytest.MonkeyPatch, first: int, *, late: bool, period: int = 10**6) -> None:
    """Governors draft nothing, and three tokens from a round of each period on; prompts are read
    late."""
    number = 0

    def ask(
        self: BatchGovernor, rows: Any, limits: list[int], greedy: bool, reviewable: int
    ) -> Asked:
        nonlocal number
        number += 1
        length = 3 if number % period > first else 0
        return Asked(0, min(length, max(limits)), [min(length, limit) for limit in limits])

    monkeypatch.setattr(BatchGovernor, "ask", ask)
    monkeypatch.setattr(BatchGovernor, "reads_prompts", lambda *_: not late)


@pytest.mark.parametrize("method", ["speculative", "top-k-tree", "hybrid"])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_late_start_drafts_the_same_tokens(
    method: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows join a batch whose draft model has read little, and leave it."""
    sampling = [
        Sampling(temperature=temperature, max_new_tokens=n, ignore_eos=True, seed=n)
        for n in (12, 40, 25, 33)
    ]
    outputs = []
    for late in (False, True):
        script(monkeypatch, 6, late=late)
        engine = engine_of(TARGET, DRAFT, method, AUTO, max_batch_size=3)
        results = engine.generate(PROMPTS, sampling)
        outputs.append((token_ids(results), results.stats.accepted))
    assert outputs[0] == outputs[1]
    assert outputs[0][1] > 0


def test_rows_come_and_go_around_a_late_start(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows whose prompts the draft model has not read join one for which it has drafted, and are
    moved when others leave, before it drafts again. A step that fails makes the scheduler warn,
    which pytest's settings turn into an error."""
    script(monkeypatch, 12, late=True, period=20)
    prompts = ragged_prompts([9, 1, 12, 30])
    samplings = [Sampling(temperature=0, max_new_tokens=n, ignore_eos=True) for n in (90, 4, 6, 40)]
    wanted = [
        engine_of(TARGET, method="plain").generate([prompt], sampling)[0].token_ids
        for prompt, sampling in zip(prompts, samplings, strict=True)
    ]
    engine = engine_of(TARGET, DRAFT, "speculative", AUTO, max_batch_size=4)
    scheduler = engine.new_scheduler()
    ids = [scheduler.add(engine.request(prompts[0], samplings[0]))]
    for _ in range(20):
        scheduler.step()
    for prompt, sampling in zip(prompts[1:], samplings[1:], strict=True):
        ids.append(scheduler.add(engine.request(prompt, sampling)))
    rows = finish(scheduler, len(ids))
    assert [rows[each].token_ids for each in ids] == list(map(list, wanted))
    assert rows[ids[-1]].stats.accepted > 0


def test_a_draft_model_that_never_drafts_never_runs(
    passes: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    script(monkeypatch, 1000, late=True)
    draft = HFModel(DRAFT.module, name="draft")
    engine_of(TARGET, draft, "speculative", AUTO).generate(
        PROMPTS, Sampling(temperature=0, max_new_tokens=20, ignore_eos=True)
    )
    assert len(passes) > 20
    assert set(passes) == {TARGET.name}


def test_a_prompt_that_is_left_for_later_counts_as_not_drafted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """So that the governor knows what the draft model has to read before it drafts."""
    script(monkeypatch, 1000, late=True)
    undrafted: list[list[int]] = []
    ask = BatchGovernor.ask

    def noting(self: BatchGovernor, rows: Any, *limits: Any) -> Asked:
        undrafted.append([row.of(0).undrafted for row in rows])
        return ask(self, rows, *limits)

    monkeypatch.setattr(BatchGovernor, "ask", noting)
    engine = engine_of(TARGET, DRAFT, "speculative", AUTO)
    sampling = Sampling(temperature=0, max_new_tokens=3, ignore_eos=True)
    engine.generate([PROMPTS[0], PROMPTS[2]], sampling)
    assert undrafted == [[69, 8], [70, 9], [71, 10]]


def test_prompts_are_read_where_drafts_pay_or_the_credit_does() -> None:
    machine = Machine(per_token=0.03, step=0.3)
    simulation = Simulation(machine, 1, seed=1)
    governor, batch = simulation.governor, BatchGovernor(simulation.governor)

    def reads(num_tokens: int) -> bool:
        return batch.reads_prompts([RowMemory(False)], [8], False, num_tokens)

    assert reads(400)  # nothing is known yet
    simulation.run(200, constant(0.9))
    assert reads(400)
    simulation.run(500, constant(0.0))
    governor.start_credit = 0.0
    assert not reads(400)
    simulation.run(2000, constant(0.0))
    assert governor.start_credit == pytest.approx(2000 * START_SHARE, rel=0.01)
    assert reads(40)
    assert not reads(40)  # the credit is spent

"""Times of rounds from before the first request: measured once, kept, and used by the governor."""

import itertools
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, random_head, tiny, token_ids

import outrider
from outrider.core import REVIEW_WIDTH
from outrider.drafters.heads.medusa import MedusaDrafter
from outrider.engine import Engine, round_times
from outrider.engine.governor.costs import RoundCosts
from outrider.engine.governor.governor import Governor
from outrider.engine.governor.saved_times import (
    ReviewTime,
    RoundTime,
    SavedTimes,
    fingerprint,
    read_times,
    write_times,
)
from outrider.engine.governor.sources import Sources
from outrider.engine.round_times import _drafter, measure_round_times
from outrider.engine.running_batch import RunningBatch

TARGET = tiny(dtype=torch.float64, std=0.2)
DRAFT = tiny(dtype=torch.float64, seed=1, std=0.2)
AUTO: Any = "auto"
ENOUGH = 600.0


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    return tmp_path


@pytest.fixture(autouse=True)
def idle_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """However busy it is."""
    monkeypatch.setattr(round_times, "processor_seconds", partial(next, count(step=1000)))


def governed(method: str = "speculative", draft: Any = DRAFT, rows: int = 4) -> Engine:
    return engine_of(TARGET, draft, method, AUTO, max_batch_size=rows)


def cells(engine: Engine, is_greedy: bool = True, source: int = 0) -> set[tuple[int, int]]:
    """Rows and draft length of what was measured."""
    assert engine.governor is not None
    costs = engine.governor.costs(is_greedy, source)
    return {(rows, length) for rows, length, _, _ in costs.cells()}


def count_rounds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    rounds: list[int] = []
    step = RunningBatch.step

    def counting(self: RunningBatch) -> None:
        rounds.append(len(self.rows))
        step(self)

    monkeypatch.setattr(RunningBatch, "step", counting)
    return rounds


@pytest.mark.parametrize(
    ("method", "draft"),
    [("speculative", DRAFT), ("prompt-lookup", None), ("hybrid", DRAFT), ("eagle3", None)],
)
def test_all_cells_are_filled(method: str, draft: Any) -> None:
    engine = governed(method, draft)
    measure_round_times(engine, seconds=ENOUGH)
    assert engine.governor is not None
    lengths = {0, 1, 2, 3, 5, engine.governor.sources.lengths[-1]}
    wanted = {(rows, length) for rows in (1, 2, 4) for length in lengths}
    for source in range(len(engine.governor.sources.names)):
        assert cells(engine, True, source) == cells(engine, False, source) == wanted


def test_the_first_rounds_after_a_prefill_draft(monkeypatch: pytest.MonkeyPatch) -> None:
    """They take longer than the next ones, and rounds without drafts must not seem to."""
    asked: list[int] = []
    ask = round_times.Script.ask

    def noting(self: round_times.Script, *arguments: Any) -> Any:
        found = ask(self, *arguments)
        asked.append(found.length)
        return found

    monkeypatch.setattr(round_times.Script, "ask", noting)
    measure_round_times(governed(rows=1), seconds=ENOUGH)
    num_reviewed = 2 * round_times._REPEATS  # each after a round without a draft
    greedy_rounds = asked[: len(asked) // 2 - num_reviewed]
    sweep = greedy_rounds[: len(greedy_rounds) // 2]
    assert greedy_rounds == 2 * sweep
    assert sweep == sorted(sweep, reverse=True)
    assert sweep[0] > 0 == sweep[-1]


def test_rounds_that_something_delayed_are_measured_again() -> None:
    """All of a length in one sweep; the first round of each sweep does not count."""
    delayed, usual = (0.5, 9.0), (0.1, 1.0)
    sweep = [(0.4, 5.0), usual, usual]
    assert round_times._undisturbed([delayed] * 3 + sweep) == usual
    assert round_times._undisturbed(sweep + [delayed] * 3) == usual


@pytest.mark.parametrize(("method", "draft"), [("speculative", DRAFT), ("prompt-lookup", None)])
def test_a_review_is_measured_where_there_is_one(method: str, draft: Any, folder: Path) -> None:
    engine = governed(method, draft, rows=2)
    measure_round_times(engine, seconds=ENOUGH)
    (file,) = folder.rglob("round_times/*.json")
    found = read_times(file.stem).reviews
    rows = {1, 2} if draft is not None else set()
    wanted = set(itertools.product((True, False), rows))
    assert {(each.greedy, each.rows) for each in found} == wanted
    assert all(each.seconds > 0 for each in found)


def test_what_reading_takes_is_known_from_reviews() -> None:
    """Whatever a draft step of many rows takes."""
    governor = Governor(Sources())
    times = [RoundTime(True, rows, n, 0.1 * rows * n, 1.0) for rows in (1, 8) for n in (0, 1)]
    governor.assume(times)
    assumed = governor.costs(True, 0).catch_up(1, REVIEW_WIDTH)
    governor.assume(times, [ReviewTime(True, 1, 0.2), ReviewTime(True, 8, 0.9)])
    governor.costs(True, 0).now += 64
    assert governor.costs(True, 0).catch_up(1, REVIEW_WIDTH) < assumed / 2


def test_times_of_a_busy_machine_are_not_kept(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process had no processor while the clock ran on."""
    monkeypatch.setattr(round_times, "processor_seconds", lambda: 0.0)
    engine = governed()
    measure_round_times(engine, seconds=ENOUGH)
    assert not cells(engine)
    assert not list(folder.rglob("*.json"))


def test_the_next_engine_measures_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = governed(), governed()
    measure_round_times(first, seconds=ENOUGH)
    rounds = count_rounds(monkeypatch)
    measure_round_times(second, seconds=ENOUGH)
    assert not rounds
    assert first.governor is not None
    assert second.governor is not None
    assert second.governor.beliefs(3) == first.governor.beliefs(3)


def test_a_larger_engine_measures_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    measure_round_times(governed(rows=2), seconds=ENOUGH)
    rounds = count_rounds(monkeypatch)
    measure_round_times(governed(rows=4), seconds=ENOUGH)
    assert set(rounds) == {4}


def test_what_does_not_fit_into_the_time_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each reading of the clock is a second later than the last."""
    now = iter(range(1000))
    rounds = count_rounds(monkeypatch)
    engine = governed(rows=16)
    measure_round_times(engine, seconds=5.0, clock=lambda: next(now))
    assert set(rounds) == {1, 2}
    assert {rows for rows, _ in cells(engine)} == {1, 2}


def test_the_first_round_is_chosen_and_not_a_measurement() -> None:
    engine, cold = governed(), governed()
    measure_round_times(engine, seconds=ENOUGH)
    believed = [
        each.generate(ragged_prompts([4]), greedy(4)).stats.believed_rounds
        for each in (engine, cold)
    ]
    assert believed[0] > 0 == believed[1]


def test_outputs_stay_and_nothing_is_learned_from_made_up_texts() -> None:
    engine = governed("suffix", None)
    drafter: Any = engine.drafter
    before = drafter.corpus.num_tokens
    measure_round_times(engine, seconds=ENOUGH)
    assert drafter.corpus.num_tokens == before == 0
    prompts = ragged_prompts([5, 3])
    plain = token_ids(engine_of(TARGET).generate(prompts, greedy(20)))
    assert token_ids(engine.generate(prompts, greedy(20))) == plain


def test_engines_without_a_governor_are_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    rounds = count_rounds(monkeypatch)
    measure_round_times(engine_of(TARGET, DRAFT), seconds=ENOUGH)
    assert not rounds


def test_fingerprints_depend_on_structure_and_not_on_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    same, other = tiny(dtype=torch.float64, seed=7), tiny(dtype=torch.float32)
    assert fingerprint([TARGET], "a") == fingerprint([same], "a")
    different = [([other], "a"), ([TARGET, DRAFT], "a"), ([TARGET], "b")]
    assert len({fingerprint(models, name) for models, name in different}) == 3
    before = fingerprint([TARGET], "a")
    monkeypatch.setattr(torch, "get_num_threads", lambda: 77)
    assert fingerprint([TARGET], "a") != before


@pytest.mark.parametrize("text", ["", "{}", '{"sizes": [1], "rounds": [{"rows": 1}]}', "[]"])
def test_a_damaged_file_counts_as_none(folder: Path, text: str) -> None:
    write_times("key", SavedTimes([1], [RoundTime(True, 1, 0, 0.0, 1.0)]))
    assert read_times("key").sizes == [1]
    (folder / "round_times" / "key.json").write_text(text, encoding="utf-8")
    assert read_times("key") == SavedTimes()


def test_a_folder_that_cannot_be_written_is_no_error(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "file").write_text("", encoding="utf-8")
    monkeypatch.setenv("OUTRIDER_CACHE", str(folder / "file"))
    write_times("key", SavedTimes())
    assert read_times("key") == SavedTimes()


def test_measured_rounds_correct_what_was_assumed() -> None:
    costs = RoundCosts(0.1)
    for length in (0, 2):
        costs.assume(1, length, 0.1 * length, 2.0 + 0.2 * length)
    assert costs.is_prepared
    assert costs.curve(1, (0, 2)) == pytest.approx([2.0, 2.4], rel=0.05)
    for _ in range(40):
        for length in (0, 2):
            costs.observe(1, length, 0.1 * length, 1.5 + 0.2 * length)
    assert costs.curve(1, (0, 2)) == pytest.approx([1.5, 1.9], rel=0.05)
    costs.assume(4, 0, 0.0, 3.0)
    low, between, high = (costs.curve(rows, (0,))[0] for rows in (1, 2, 4))
    assert low < between < high


class Lockstep(Engine):
    """An engine whose processes run the same forward passes."""


def test_processes_in_lockstep_measure_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their clocks and cache folders differ, and so would the rounds that they measure."""
    rounds = count_rounds(monkeypatch)
    for make, measures in ((Lockstep, False), (Engine, True)):
        engine = outrider.load(
            TARGET, DRAFT, num_speculative_tokens="auto", max_batch_size=1, make=make
        )
        assert type(engine) is make
        assert bool(rounds) is measures


def test_drafters_of_other_options_have_times_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    def tree(width: int) -> Engine:
        return engine_of(
            TARGET, DRAFT, "dynamic-tree", AUTO, options={"width": width}, max_batch_size=1
        )

    measure_round_times(tree(2), seconds=ENOUGH)
    rounds = count_rounds(monkeypatch)
    measure_round_times(tree(2), seconds=ENOUGH)
    assert not rounds
    measure_round_times(tree(3), seconds=ENOUGH)
    assert rounds


def test_a_head_without_a_model_drafts_in_measured_rounds() -> None:
    engine = engine_of(TARGET, random_head("medusa", TARGET), "medusa", AUTO, max_batch_size=1)
    assert not engine.drafter.capabilities.models
    assert isinstance(_drafter(engine), MedusaDrafter)

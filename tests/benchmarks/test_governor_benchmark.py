"""The governor's benchmark: texts, noise, ratios, and the page."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny

from benchmarks import governor, governor_cost, governor_steps, side_by_side
from benchmarks.governor_cases import add_noise, prompts_of
from outrider import assets, load_model


def test_the_governor_is_compared_with_the_best_of_the_others(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Speeds are given: 100 for plain decoding, then 120, 150, and 141 for the governor."""
    target = tiny(dtype=torch.float64)
    engines = {
        "plain": engine_of(target),
        "2": engine_of(target, target, γ=2),
        "5": engine_of(target, target, γ=5),
        "auto": engine_of(target, target, "speculative", "auto"),  # type: ignore[arg-type]
    }
    given = {"plain": 100.0, "2": 120.0, "5": 150.0, "auto": 141.0}
    monkeypatch.setattr(side_by_side, "speeds", lambda these, *_: {n: given[n] for n in these})
    row = governor.measure(engines, ragged_prompts([4, 5]), greedy(8), seconds=0)
    assert row["over_plain"] == pytest.approx([1.41] * 3)
    assert row["over_best"] == pytest.approx([0.94] * 3)
    assert [len(turns) for turns in row["speeds"].values()] == [4] * 4
    about = {"date": "d", "hardware": "h", "threads": 2, "versions": {"torch": "t"}}
    about |= {"command": "c", "tokens": 8}
    page = governor.markdown({"about": about, "cells": {"good, 0, code, 2": row}})
    ends = "1.410 to 1.410 | 5 | **0.940** | 0.940 to 0.940 |"
    assert f"| good | 0 | code | 2 | 4 | 100 | 141 | 1.410 | {ends}" in page
    assert "plain decoding: 1 of 1 cells at 0.97 or more, 0 clearly below; the lowest 1.410" in page
    assert "pays: 0 of 1 cells at 0.95 or more, 1 clearly below; the lowest 0.940" in page


def test_the_best_of_a_turn_is_chosen_by_the_other_half() -> None:
    """Each of two equal engines is lucky in one half."""
    lucky, unlucky = [3.0, 2.0, 3.0, 2.0], [2.0, 3.0, 2.0, 3.0]
    assert governor.best_elsewhere([lucky, unlucky]) == [2.0, 2.0, 2.0, 2.0]
    assert governor.best_elsewhere([lucky[:3], [4.0, 5.0, 4.0]]) == [4.0, 5.0, 4.0]


def test_the_number_of_turns_is_even(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(governor, "_LEAST_TURNS", 3)
    target = tiny(dtype=torch.float64)
    plain = engine_of(target)
    engines = {"plain": plain, "2": engine_of(target, target, γ=2), "auto": plain}
    row = governor.measure(engines, ragged_prompts([4]), greedy(4), seconds=0)
    assert [len(turns) for turns in row["speeds"].values()] == [4] * 3


def test_ratios_are_of_numbers_of_the_same_turn() -> None:
    ratio = governor.Ratio.of([10.0, 22.0, 36.0], [10.0, 20.0, 30.0])
    assert ratio == pytest.approx((1.1, 1.0, 1.2))


def test_a_change_is_followed_where_nearly_all_rounds_do() -> None:
    assert governor_steps.delay([3, 3, 0, *[0, 0, 1, 0, 0, 0, 0, 1]], False) == 2
    assert governor_steps.delay([0] * 5 + [1] + [0] * 5 + [2] * 8, True) == 11
    assert governor_steps.delay([0] * 20, True) is None


def test_noise_spoils_a_draft_in_place() -> None:
    model: Any = tiny(seed=1)
    weight = model.module.lm_head.weight.detach()
    before, place = weight.clone(), weight.data_ptr()
    add_noise(model.module, 0.0)
    assert torch.equal(weight, before)
    add_noise(model.module, 0.5)
    assert weight.data_ptr() == place
    assert float((weight - before).std() / before.std()) == pytest.approx(0.5, rel=0.1)


def test_a_noisy_draft_is_a_folder_of_its_own(tmp_path: Path) -> None:
    source = assets.draft_path()
    assert governor.noisy_draft(source, 0.0, None, tmp_path) == source
    assert not list(tmp_path.iterdir())
    noisy = load_model(governor.noisy_draft(source, 2.0, "float32", tmp_path), dtype="float32")
    given = load_model(source, dtype="float32")
    assert noisy.tokenizer is not None
    changed = {
        name: not torch.equal(weight, noisy.module.get_parameter(name))
        for name, weight in given.module.named_parameters()
    }
    assert changed == {name: weight.ndim > 1 for name, weight in given.module.named_parameters()}


@pytest.mark.parametrize("text", governor.TEXTS)
def test_prompts_of_a_batch_differ(text: str) -> None:
    prompts = prompts_of(text, 6, 50)
    assert len({str(prompt) for prompt in prompts}) == 6


def test_the_cost_of_choices_is_a_table(tmp_path: Path) -> None:
    governor_cost.main(["--choices", "50", "--batches", "1", "3", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "governor_cost.json").read_text(encoding="utf-8"))
    assert [(cell["batch"], cell["acceptance"]) for cell in report["cells"]] == [
        (1, 0.8),
        (1, 0.1),
        (3, 0.8),
        (3, 0.1),
    ]
    for cell in report["cells"]:
        assert cell["both"] == pytest.approx(cell["choice"] + cell["outcome"])
    assert "| 3 | 0.1 |" in (tmp_path / "governor_cost.md").read_text(encoding="utf-8")

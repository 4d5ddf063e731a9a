"""Parts of single recipes; and the recipes that take little time, on the embedded pair."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from tiny_bench import tiny_pair
from tiny_models import tiny

from outrider import Sampling, assets
from outrider.core import Draft
from outrider.core.errors import InvalidParameterError
from outrider.drafters.tree.topology import Topology
from outrider.lab.analysis.experts import experts_touched
from outrider.lab.analysis.tokens_per_round import expected_tokens
from outrider.lab.data import read_data
from recipes import online_shift as online_shift_recipe
from recipes.reproduce import __main__ as command_line
from recipes.reproduce.chains import observe_rounds
from recipes.reproduce.papers import (
    beta_batch,
    chen_figure_1,
    distill_grid,
    draft_size,
    experts,
    leviathan_figures,
    online_shift,
    trees,
)
from recipes.reproduce.subject import TASKS


def test_simulated_rounds_have_the_formulas_mean() -> None:
    """The seed is fixed; the tolerance is five standard errors of 20,000 rounds."""
    for alpha, gamma in ((0.5, 3), (0.9, 7)):
        expected = expected_tokens(alpha, gamma)
        assert leviathan_figures.simulated(alpha, gamma) == pytest.approx(expected, rel=0.03)


def test_drafts_of_one_size_are_refused_where_sizes_are_compared() -> None:
    lab: Any = SimpleNamespace(
        subject=SimpleNamespace(drafts=("one/", "other/")), model=lambda draft: tiny(name=draft)
    )
    with pytest.raises(InvalidParameterError, match="one/, other/: two of them are of one size"):
        draft_size.measure(lab)


@pytest.mark.parametrize("width", [1, 2, 3])
def test_k_ary_trees_have_the_wanted_nodes_and_no_node_has_more_children(width: int) -> None:
    tree = trees.k_ary(width, 7)
    assert len(tree.paths) == 7
    assert max(path[-1] for path in tree.paths) == width - 1
    written = tree.paths
    assert Topology.rank_paths(written).paths == written


def test_a_topology_is_read_back_from_its_file(tmp_path: Path) -> None:
    tree = trees.k_ary(2, 5)
    file = trees.written(tree, tmp_path / "tree.json")
    assert [tuple(path) for path in json.loads(file.read_text())["paths"]] == list(tree.paths)


def test_experts_are_counted_once_per_pass() -> None:
    found = experts.touched(experts.mixtral(0), 4, 0)
    assert found["1"] == [experts.PER_TOKEN] * 4
    for tokens, counts in found.items():
        assert max(counts) <= min(experts.EXPERTS, experts.PER_TOKEN * int(tokens))
    assert sum(found["9"]) / 4 < experts_touched(experts.EXPERTS, experts.PER_TOKEN, 9) + 1


def test_linear_times_have_an_r_squared_of_1() -> None:
    assert chen_figure_1._r_squared({1: 3.0, 2: 5.0, 4: 9.0}) == pytest.approx(1)
    assert chen_figure_1._r_squared({1: 1.0, 2: -1.0, 3: 1.0}) == pytest.approx(0)


def test_observed_rounds_show_drafts_with_the_distributions_that_verify_them() -> None:
    pair = tiny_pair()
    seen: list[tuple[Draft, torch.Tensor]] = []
    sampling = Sampling(temperature=1.0)
    observe_rounds(
        pair["target"],
        pair["draft"],
        [[1, 2, 3], [4, 5]],
        sampling,
        3,
        2,
        lambda draft, p_BNV: seen.append((draft, p_BNV.clone())),
    )
    assert len(seen) == 2
    for draft, p_BNV in seen:
        assert draft.tokens_BN.shape == (2, 4)
        assert p_BNV.shape[:2] == (2, 4)
        assert torch.allclose(p_BNV.sum(2), torch.ones(2, 4))
        assert draft.probs_BNV is not None


@pytest.mark.parametrize("timed", [False, True])
def test_beta_is_a_ratio_of_times_and_speculation_stops_where_no_draft_pays(timed: bool) -> None:
    """A pass over n tokens takes 1 up to 16 tokens and n / 16 beyond."""
    times = {
        B: {N: [max(1.0, B * N / 16)] * (3 if timed else 1) for N in (1, 2, 3, 5, 9)}
        for B in beta_batch.BATCHES
    }
    found = beta_batch.evaluate(times, 0.7, 0.1, timed)
    assert [each.outcome for each in found.effects] == ["shown", "shown"]
    rows = {row[0]: row[1:] for row in found.tables[0].rows}
    assert rows["4"] == ["1.00", "1.00", "1.25", "2.25", "1.82× at γ 2"]
    assert rows["16"] == ["2.00", "3.00", "5.00", "9.00", "none"]
    assert found.effects[1].size == "batch 16"


def test_computed_times_grow_with_the_tokens_once_they_are_bound_by_arithmetic() -> None:
    lab: Any = SimpleNamespace(
        subject=SimpleNamespace(target="embedded"),
        model=lambda name, role: SimpleNamespace(
            module=SimpleNamespace(name_or_path=str(assets.target_path()))
        ),
    )
    found = beta_batch.counted(lab)
    assert found[1][2] == found[1][1]
    assert found[32][9][0] == pytest.approx(9 * found[32][1][0], rel=1e-3)


def test_online_adaptation_compares_the_arms_late_after_the_change() -> None:
    num = online_shift_recipe.BURSTS_BEFORE + online_shift_recipe.BURSTS_AFTER
    arms = {
        arm: [0.7] * online_shift_recipe.BURSTS_BEFORE + [late] * online_shift_recipe.BURSTS_AFTER
        for arm, late in (("frozen", 0.4), ("online", 0.5), ("oracle", 0.6))
    }
    assert len(arms["frozen"]) == num
    findings = online_shift.evaluate(arms, {"recovered": 0.5})
    assert [each.outcome for each in findings.effects] == ["shown", "shown"]
    swapped = online_shift.evaluate(arms | {"online": arms["frozen"]}, {"recovered": 0.0})
    assert swapped.effects[0].outcome == "undecided"


@pytest.mark.parametrize(("low", "outcome"), [(0.01, "shown"), (-0.01, "reversed")])
def test_distillation_needs_an_interval_above_0(low: float, outcome: str) -> None:
    cell = {"alpha": 0.5, "low": 0.45, "high": 0.55, "acceptance_length": 2.0}
    names = (("forward-kl", "target"), ("cross-entropy", "ground-truth"))
    document: dict[str, Any] = {
        "cells": [{"divergence": d, "data": k, **cell} for d, k in names],
        "differences": [
            {
                "distilled": "forward-kl on target",
                "baseline": "cross-entropy on ground-truth",
                "difference": 0.05,
                "low": low,
                "high": 0.09,
            }
        ],
    }
    keys = {"BASELINE": names[1], "COMPARED": names[0]}
    stand_in = SimpleNamespace(**keys)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(distill_grid, "distill_grid", stand_in)
        findings = distill_grid.evaluate(document)
    assert findings.effects[0].outcome == outcome
    grid, listed = findings.tables
    assert grid.head == ["divergence", "target", "ground-truth"]
    assert grid.rows == [["forward-kl", "0.500", "–"], ["cross-entropy", "–", "0.500"]]
    assert len(listed.rows) == 2


def test_the_prompts_of_tasks_have_references_where_a_metric_needs_them() -> None:
    data = read_data(str(TASKS))
    tasks = {example.task for example in data}
    assert {"free", "translation", "summarisation", "qa", "maths", "rag", "code"} < tasks
    for example in data:
        if example.task in ("translation", "summarisation", "maths", "rag", "copy"):
            assert example.reference, example.id


@pytest.mark.slow
def test_effects_that_need_little_time_have_their_sign_on_the_embedded_pair(
    tmp_path: Path,
) -> None:
    """The error probability of each effect is at most 5 %; `make quick` checks all recipes."""
    names = ["leviathan-figures-2-3", "experts", "block-verification"]
    assert command_line.main([*names, "--quick", "--dry", "--out", str(tmp_path)]) == 0

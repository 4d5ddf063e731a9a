"""Recipes on tiny models: they resume, and their verdicts become documents and pages."""

import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_bench import tiny_data, tiny_pair

from outrider.core.errors import InvalidParameterError
from outrider.lab.analysis.block_tokens import block_tokens, chain_tokens
from outrider.lab.bench import DataSpec, run_bench
from recipes.reproduce import __main__ as command_line
from recipes.reproduce import lab as lab_module
from recipes.reproduce import outputs
from recipes.reproduce.catalogue import RECIPES
from recipes.reproduce.chains import expected_accepted
from recipes.reproduce.document import publish, write_page
from recipes.reproduce.downstream import BLEU, FINAL_NUMBER, downstream
from recipes.reproduce.effect import certain, greater
from recipes.reproduce.lab import Lab
from recipes.reproduce.recipe import Figure, Findings, NotTestableError, Recipe, Table, UntimedError
from recipes.reproduce.run import run_on_first, run_on_paper_models, run_recipe
from recipes.reproduce.subject import (
    SMOLLM2_DRAFT,
    SMOLLM2_DRAFT_SHAPE,
    SMOLLM2_HEAD,
    Size,
    Subject,
    default_subjects,
    smollm2,
    smollm2_inflated,
)

SMALL = Size("quick", prompts=3, tokens=6, repeats=2, batch_size=3, timed=False)


@pytest.fixture
def lab(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    return tiny_lab(tmp_path, monkeypatch)


def tiny_lab(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    pair = tiny_pair()

    def with_data(plan: Any, *rest: Any, **settings: Any) -> Any:
        return run_bench(plan, *rest, data={"memory": tiny_data()}, models=pair, **settings)

    monkeypatch.setattr(lab_module, "run_bench", with_data)
    data = DataSpec("memory")
    prompts: Any = {"code": data, "free": data, "copy": data}
    found = Lab(Subject("tiny pair", "target", ("draft",), prompts, data), SMALL, folder)
    monkeypatch.setattr(found, "model", lambda name, role="draft": pair[name])
    return found


def measure(lab: Lab) -> Findings:
    cells = lab.bench("speculative", gammas=[2], temperatures=[1.0])
    fast, plain = cells.one("speculative", gamma=2), cells.one("plain")
    per_round = [outputs.values(cell, outputs.tokens_per_round) for cell in (fast, plain)]
    return Findings(
        [greater("more than one token per round", *per_round)],
        [Table("Rounds", ["", "tokens"], [["speculative", "2"]])],
        [Figure("Figure", "x", "y", {"line": [(0, 1), (1, 2)]})],
        ["A note."],
    )


def recipe(run: Any = measure, name: str = "tiny") -> Recipe:
    return Recipe(name, "A title", "A source", "A claim.", run)


def test_a_recipe_measures_each_cell_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run_recipe(recipe(), tiny_lab(tmp_path, monkeypatch), "command")
    lines = (tmp_path / "journal.jsonl").read_text().splitlines()
    assert len(lines) == 2 * SMALL.repeats
    again = run_recipe(recipe(), tiny_lab(tmp_path, monkeypatch), "command")
    assert (tmp_path / "journal.jsonl").read_text().splitlines() == lines
    assert again.findings == first.findings
    assert first.verdict == "reproduced in shape"


def test_values_are_of_single_outputs_and_greedy_ones_count_once(lab: Lab) -> None:
    cells = lab.bench("speculative", gammas=[2], temperatures=[1.0])
    found = outputs.values(cells.one("speculative"), outputs.tokens_per_round)
    assert len(found) == SMALL.prompts * SMALL.repeats
    greedy = lab.bench("speculative", gammas=[2], temperatures=[0.0], repeats=3, max_repeats=3)
    assert len(outputs.values(greedy.one("speculative"), outputs.tokens_per_round)) == SMALL.prompts


def test_meters_read_cells_that_were_measured_without_them(lab: Lab) -> None:
    plain = lab.bench("speculative", gammas=[2], temperatures=[1.0])
    assert plain.one("plain").repeats[0].readings == {}
    metered = lab.bench("speculative", gammas=[2], temperatures=[1.0], meters=["energy-model"])
    assert metered.one("plain").repeats[0].readings["energy-model"]["joules"] > 0


def test_counted_speed_divides_tokens_by_passes(lab: Lab) -> None:
    cell = lab.bench("speculative", gammas=[2], temperatures=[1.0]).one("speculative")
    request = next(cell.repeats[0].requests)
    total = request.total()
    expected = total.emitted / (total.rounds * (1 + 0.25 * 2))
    assert outputs.counted_speed(0.25, 2)(request) == pytest.approx(expected)
    assert outputs.counted_time(0.25, 2)(request) == pytest.approx(1 / expected)


def test_a_computation_is_kept_by_its_settings(lab: Lab) -> None:
    calls: list[int] = []

    def compute() -> dict[str, int]:
        calls.append(1)
        return {"a": len(calls)}

    assert lab.kept("name", compute, size=1) == {"a": 1}
    assert lab.kept("name", compute, size=1) == {"a": 1}
    assert lab.kept("name", compute, size=2) == {"a": 2}


def test_what_is_missing_is_a_verdict(lab: Lab) -> None:
    def missing(lab: Lab) -> Findings:
        raise NotTestableError("no heads")

    outcome = run_recipe(recipe(missing), lab, "command")
    assert (outcome.verdict, outcome.reason) == ("not testable here", "no heads")
    assert outcome.failures == ["no heads"]


def test_recipes_of_times_are_left_out_of_quick_runs(lab: Lab) -> None:
    def timed(lab: Lab) -> Findings:
        lab.require_times()
        raise AssertionError

    with pytest.raises(UntimedError):
        run_recipe(recipe(timed), lab, "command")


def test_paper_models_that_are_not_public_are_a_verdict(tmp_path: Path) -> None:
    outcome, _ = run_on_paper_models(recipe(), SMALL, tmp_path, "command")
    assert outcome.verdict == "not testable here"
    assert "not public" in outcome.reason


def test_a_recipe_with_an_error_does_not_stop_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def broken(lab: Lab) -> Findings:
        raise AssertionError("a bug")

    def timed(lab: Lab) -> Findings:
        lab.require_times()
        raise AssertionError

    fine = recipe(lambda lab: Findings([certain("a", "b", True)]), "fine")
    listed = (recipe(broken, "broken"), recipe(timed, "timed"), fine)
    monkeypatch.setattr(command_line, "RECIPES", listed)
    arguments = ["--quick", "--dry", "--out", str(tmp_path)]
    assert command_line.main(arguments) == 1
    said = capsys.readouterr().out
    assert "broken: failed" in said
    assert "timed: left out" in said
    assert "fine: reproduced in shape" in said
    assert command_line.main([*arguments, "fine", "timed"]) == 0


def test_an_unknown_recipe_is_an_error_that_lists_all() -> None:
    with pytest.raises(SystemExit, match="no recipe 'nothing'; known: leviathan"):
        command_line.main(["nothing", "--quick", "--dry"])


def test_an_effect_that_need_not_be_shown_is_no_failure(lab: Lab) -> None:
    def undecided(lab: Lab) -> Findings:
        return Findings([certain("a", "b", False, "noise"), certain("c", "d", False)])

    outcome = run_recipe(recipe(undecided), lab, "command")
    assert outcome.verdict == "not reproduced"
    assert [failure.split(":")[0] for failure in outcome.failures] == ["c"]


def test_a_page_has_verdict_effects_numbers_and_how_it_was_measured(
    lab: Lab, tmp_path: Path
) -> None:
    outcome = run_recipe(recipe(), lab, "python -m recipes.reproduce tiny --quick")
    assert publish(outcome, tmp_path / "results", tmp_path / "pages")
    text = (tmp_path / "pages" / "tiny.md").read_text()
    for part in (
        "# A title",
        "A source. A claim.",
        "**Reproduced in shape, by counts.**",
        "| more than one token per round | shown |",
        "| speculative | 2 |",
        "![Figure](tiny-1.svg)",
        "A note.",
        "Times were not measured",
        "Tiny pair",
        "`python -m recipes.reproduce tiny --quick`",
    ):
        assert part in text, part
    assert (tmp_path / "pages" / "tiny-1.svg").exists()
    document = json.loads((tmp_path / "results" / "tiny.json").read_text())
    (tmp_path / "pages" / "tiny.md").unlink()
    write_page(document, tmp_path / "pages")
    assert (tmp_path / "pages" / "tiny.md").read_text() == text


def test_lossy_methods_are_marked_wherever_a_page_names_them(lab: Lab, tmp_path: Path) -> None:
    def compare(lab: Lab) -> Findings:
        settings = {"gammas": [2], "temperatures": [1.0]}
        cells = lab.bench("speculative", "mentored:budget=0.5,label=D = 0.5", **settings)
        lossy, exact = cells.one("D = 0.5"), cells.one("speculative")
        speeds = [outputs.values(each, outputs.tokens_per_round) for each in (lossy, exact)]
        return Findings(
            [greater("D = 0.5 is faster", *speeds)],
            [
                Table("By row", ["", "speed"], [["D = 0.5, γ 2", "2×"], ["speculative", "1×"]]),
                Table("By column", ["γ", "speculative", "D = 0.5"], [["2", "1×", "2×"]]),
            ],
            [Figure("Figure", "x", "y", {"D = 0.5": [(0, 1), (1, 2)], "speculative": [(0, 1)]})],
            shortfalls=["D = 0.5: 2× per round"],
        )

    outcome = run_recipe(recipe(compare), lab, "command")
    assert outcome.about["lossy"] == {"D = 0.5": "mentored"}
    publish(outcome, tmp_path / "results", tmp_path / "pages")
    text = (tmp_path / "pages" / "tiny.md").read_text()
    for part in (
        "Lossy: outputs of `mentored` do not have the target's distribution.",
        "- D = 0.5 (lossy): 2× per round.",
        "| D = 0.5 (lossy) is faster |",
        "| D = 0.5 (lossy), γ 2 | 2× |",
        "| γ | speculative | D = 0.5 (lossy) |",
        "| speculative | 1× |",
    ):
        assert part in text, part
    legend = (tmp_path / "pages" / "tiny-1.svg").read_text()
    assert "D = 0.5 (lossy)" in legend
    assert "speculative (lossy)" not in legend


def test_a_quick_run_does_not_replace_a_full_one(lab: Lab, tmp_path: Path) -> None:
    outcome = run_recipe(recipe(), lab, "command")
    results = tmp_path / "results"
    assert publish(outcome, results, tmp_path / "pages")
    file = results / "tiny.json"
    document = json.loads(file.read_text())
    document["about"]["size"] = "full"
    file.write_text(json.dumps(document))
    assert not publish(outcome, results, tmp_path / "pages")
    assert json.loads(file.read_text())["about"]["size"] == "full"


def test_what_could_not_run_replaces_no_measurement(lab: Lab, tmp_path: Path) -> None:
    """As the papers' own models where there is no network."""
    folders = tmp_path / "results", tmp_path / "pages"
    measured = run_recipe(recipe(), lab, "command")
    nothing = replace(measured, findings=None, verdict="not testable here", reason="no network")
    assert publish(nothing, *folders)
    assert publish(measured, *folders)
    assert not publish(nothing, *folders)
    assert json.loads((folders[0] / "tiny.json").read_text())["verdict"] == measured.verdict


def test_results_on_a_chosen_subject_are_listed_apart(lab: Lab, tmp_path: Path) -> None:
    outcome = run_recipe(replace(recipe(), name="spectr"), lab, "command")
    for subject in ("inflated", ""):
        assert publish(outcome, tmp_path / "results" / subject, tmp_path / "pages" / subject)
    chosen = (tmp_path / "pages/inflated/README.md").read_text()
    assert "`python -m recipes.reproduce spectr --subject inflated`" in chosen
    assert "not run yet" not in chosen
    everything = (tmp_path / "pages/README.md").read_text()
    assert "[inflated](inflated/README.md)" in everything
    assert "`python -m recipes.reproduce spectr`" in everything
    assert "not run yet" in everything


def test_recipes_have_names_sources_and_claims_of_their_own() -> None:
    assert len({each.name for each in RECIPES}) == len(RECIPES)
    for each in RECIPES:
        assert each.claim.endswith("."), each.name
        assert "" not in (each.title, each.source), each.name


def test_smollm2_has_its_drafts_and_the_head(tmp_path: Path) -> None:
    """The draft that comes with the package is the first; its own run is not taken twice."""
    assert smollm2(tmp_path) is None
    (tmp_path / "model").mkdir()
    (tmp_path / "model/config.json").write_text("{}")
    alone = smollm2(tmp_path)
    assert alone is not None
    assert (alone.drafts, alone.heads) == ((SMOLLM2_DRAFT,), (SMOLLM2_HEAD,))
    for shape, weights in (("6x288", b"1234"), ("2x96", b"12"), (SMOLLM2_DRAFT_SHAPE, b"123")):
        folder = tmp_path / "distilled" / shape / "best"
        folder.mkdir(parents=True)
        (folder / "config.json").write_text("{}")
        (folder / "model.safetensors").write_bytes(weights)
    found = smollm2(tmp_path)
    assert found is not None
    assert found.drafts[0] == SMOLLM2_DRAFT
    assert [Path(each).parent.name for each in found.drafts[1:]] == ["2x96", "6x288"]
    assert found.heads == (SMOLLM2_HEAD,)
    assert [each.name for each in default_subjects(quick=True)] == ["embedded pair"]


def test_the_inflated_target_has_to_be_made(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match=r"python -m benchmarks\.inflate"):
        smollm2_inflated(tmp_path)
    (tmp_path / "inflated").mkdir()
    (tmp_path / "inflated/config.json").write_text("{}")
    found = smollm2_inflated(tmp_path)
    assert (found.target, found.drafts) == (str(tmp_path / "inflated"), (SMOLLM2_DRAFT,))


def test_a_recipe_that_needs_a_draft_model_runs_on_the_first_subject_with_one(lab: Lab) -> None:
    without = Lab(replace(lab.subject, name="alone", drafts=()), SMALL, lab.folder)
    outcome, used = run_on_first(recipe(), [without, lab], "command")
    assert (used, outcome.verdict) == (lab, "reproduced in shape")
    outcome, used = run_on_first(recipe(), [without], "command")
    assert (used, outcome.verdict) == (without, "not testable here")
    assert outcome.reason == "alone has no draft model for speculative"

    def fails(lab: Lab) -> Findings:
        raise NotTestableError("another reason")

    outcome, used = run_on_first(recipe(fails), [without, lab], "command")
    assert (used, outcome.reason) == (without, "another reason")


def test_seeds_follow_from_names(lab: Lab, tmp_path: Path) -> None:
    """The expected seed is the start of ``printf tiny | sha256sum``."""
    assert recipe().seed == 0x8950AB
    assert len({each.seed for each in RECIPES}) == len(RECIPES)
    seeded = Lab(lab.subject, SMALL, tmp_path, seed=7)
    seeded.model = lab.model  # type: ignore[method-assign]
    cells = seeded.bench("speculative", gammas=[2], temperatures=[1.0])
    assert [each.seed for each in cells.one("plain").repeats] == [7, 8]


# ---------------------------------------------------------------------- expectations of chains


def chains(V: int, gamma: int) -> Iterator[tuple[int, ...]]:
    if gamma == 0:
        yield ()
        return
    for head in range(V):
        yield from ((head, *rest) for rest in chains(V, gamma - 1))


@pytest.mark.parametrize("gamma", [1, 2, 3])
def test_expected_acceptance_agrees_with_enumeration_over_all_drafts(gamma: int) -> None:
    """Averaged over all drafts, each with its probability, both expectations are the closed forms
    for positions with equal distributions."""
    p, q = [0.5, 0.3, 0.2], [0.2, 0.2, 0.6]
    drafts = list(chains(3, gamma))
    tokens_BN = torch.tensor([[0, *draft] for draft in drafts])
    p_BNV = torch.tensor(p).expand(len(drafts), gamma + 1, 3)
    q_BNV = torch.tensor(q).expand(len(drafts), gamma, 3)
    weights_B = torch.tensor([torch.tensor([q[x] for x in draft]).prod() for draft in drafts])
    token_B, block_B = expected_accepted(p_BNV, q_BNV, tokens_BN)
    token, block = (float((weights_B * each_B).sum()) for each_B in (token_B, block_B))
    assert token == pytest.approx(chain_tokens(p, q, gamma) - 1, abs=1e-6)
    assert block == pytest.approx(block_tokens(p, q, gamma) - 1, abs=1e-6)
    assert block >= token - 1e-9


# -------------------------------------------------------------------------------- task metrics


def test_task_metrics_are_of_the_subjects_tasks(lab: Lab, tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    rows = [{"prompt": f"ab{i}", "task": "maths", "reference": f"#### {i}"} for i in range(3)]
    file.write_text("".join(json.dumps(each) + "\n" for each in rows))
    lab.subject = replace(lab.subject, tasks=DataSpec(str(file), "tasks"))
    tables, notes = downstream(lab, [FINAL_NUMBER], ["speculative"], gammas=[2])
    (table,) = tables
    assert notes == []
    assert [row[0] for row in table.rows] == ["plain", "speculative"]
    assert all(float(row[1]) <= 1 for row in table.rows)
    assert table.rows[1][2] == "+0 (0 to 0)", "greedy outputs are the same"
    tables, notes = downstream(lab, [BLEU], ["speculative"])
    assert (tables, len(notes)) == ([], 1)
    assert "BLEU of translations" in notes[0]

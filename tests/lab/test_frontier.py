"""The parts of the frontier: rule families, the plane on toy distributions, perplexity, figure."""

import json
import math
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import outrider
from outrider.core import output_distribution
from outrider.engine import Engine
from outrider.lab import plots
from outrider.lab.frontier import (
    FAMILIES,
    SETTINGS,
    Family,
    Plane,
    compare_rules,
    dumps,
    paired_distributions,
)
from outrider.lab.frontier.envelope import MentoredEnvelope, chunks
from outrider.lab.frontier.generations import perplexity
from outrider.lab.metadata import run_metadata
from outrider.methods import METHODS, find_method
from outrider.sampling import Sampling
from outrider.verifiers import Ensemble, Mentored, Rejection

FEW = (
    Family("speculative", Rejection),
    Family("mentored kl", Mentored, "budget", (0.01, 0.1, 1.0), {"divergence": "kl"}),
    Family("mentored tv", Mentored, "budget", (0.01, 0.1), {"divergence": "tv"}),
    Family("ensemble", Ensemble, "weight", (0.9, 0.5)),
)


def toy_distributions(K: int = 12, V: int = 40) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    p_KV, q_KV = torch.randn(2, K, V, generator=generator).mul(2).softmax(-1)
    p_KV = torch.where(p_KV > 0.01, p_KV, 0.0)  # truncated, as by top-p
    return p_KV / p_KV.sum(-1, keepdim=True), q_KV


def test_families_are_the_lossy_closed_form_rules_and_rejection() -> None:
    names = {family.name.split()[0] for family in FAMILIES}
    closed = {
        name
        for name, method in METHODS.items()
        if not method.lossless
        and hasattr(method.rule, "acceptance")
        and not method.needs_head  # Medusa's rule is the family "typical"
    }
    assert names == closed | {"speculative"}
    assert len({family.name for family in FAMILIES}) == len(FAMILIES)
    for family in FAMILIES:
        assert len(list(family.rules())) == len(family.grid)


def test_every_setting_has_a_known_method_and_valid_options() -> None:
    for setting in SETTINGS:
        find_method(setting.method).recipe(setting.options)
    assert SETTINGS[0].method == "plain"
    assert len({setting.name for setting in SETTINGS}) == len(SETTINGS)


@pytest.fixture(scope="module")
def plane() -> Plane:
    return compare_rules(*toy_distributions(), families=FAMILIES)


def test_plane_of_toy_distributions(plane: Plane) -> None:
    assert plane.envelope.holds, plane.envelope.as_dict()
    assert plane.envelope.comparisons["tv"] == 12 * sum(len(f.grid) for f in FAMILIES)
    lines = {line["name"]: line["points"] for line in plane.as_dict()["lines"]}
    kl = lines["mentored kl"]
    accepted = [point["acceptance"] for point in kl]
    assert accepted == sorted(accepted)
    assert all(point["kl"] <= point["value"] for point in kl)
    assert lines["speculative"][0]["kl"] < 1e-12
    assert lines["ensemble"][0]["rkl"] == math.inf  # off the truncated support


def test_chunks_are_normalised_and_in_order() -> None:
    p_KV, q_KV = toy_distributions()
    parts = list(chunks(p_KV, q_KV, numbers=3 * 40))
    assert [len(p) for p, _ in parts] == [3, 3, 3, 3]
    whole = torch.cat([p for p, _ in parts])
    assert whole.dtype == torch.float64
    assert torch.allclose(whole, p_KV.double(), rtol=0, atol=1e-6)
    assert torch.equal(whole.sum(-1).sub(1).abs() < 1e-15, torch.ones(12).bool())


@pytest.mark.parametrize("divergence", ["kl", "rkl", "tv", "chi2"])
def test_a_rule_with_cached_paths_is_the_same_rule(divergence: Any) -> None:
    ((p_KV, q_KV),) = chunks(*toy_distributions())
    rule = Mentored(0.1, divergence)
    lent = MentoredEnvelope(p_KV, q_KV).with_cached_paths(rule)
    assert torch.equal(output_distribution(lent, p_KV, q_KV), output_distribution(rule, p_KV, q_KV))
    assert all(getattr(lent, each.name) == getattr(rule, each.name) for each in fields(rule))


def test_the_best_rule_takes_a_budget_per_position() -> None:
    ((p_KV, q_KV),) = chunks(*toy_distributions())
    budgets_K = torch.linspace(0.001, 0.3, 12, dtype=torch.float64)
    found_K = MentoredEnvelope(p_KV, q_KV)("kl", budgets_K, False)
    for k, budget in enumerate(budgets_K.tolist()):
        r_V = Mentored(budget).acceptance(p_KV[k], q_KV[k])
        assert float(found_K[k]) == pytest.approx(float((q_KV[k] * r_V).sum()), abs=1e-9)


@dataclass(frozen=True)
class Overclaiming(Ensemble):
    """Wrong: reports more acceptance than the distribution that it emits allows."""

    def acceptance(self, p_V: Tensor, q_V: Tensor) -> Tensor:
        return super().acceptance(p_V, q_V).sqrt() * 1.1

    def reject(self, p_V: Tensor, q_V: Tensor | None, x: Tensor) -> tuple[Tensor, Tensor | None]:
        return p_V, q_V


def test_a_rule_above_the_envelope_is_named() -> None:
    bad = Family("too good", Overclaiming, "weight", (0.9,))
    envelope = compare_rules(*toy_distributions(), families=(*FEW, bad)).envelope
    assert not envelope.holds
    assert "too good weight=0.9" in envelope.worst_rule.values()


def test_perplexity() -> None:
    """Two prompts with outputs of different lengths, by hand."""
    outputs = [("a", [-1.0, -3.0]), ("a", [-1.0]), ("b", [-2.0]), ("b", [-3.0])]
    found = perplexity(outputs)
    assert found["macro"] == pytest.approx(math.exp(2))
    assert found["micro"] == pytest.approx(math.exp(2))
    assert found["error"] == pytest.approx(math.exp(2) * math.sqrt(0.5 / 4))
    assert (found["texts"], found["tokens"]) == (4, 5)
    assert perplexity([("a", [-1.0])])["error"] == math.inf
    unequal = perplexity([("a", [-1.0]), ("a", [-4.0, -4.0, -4.0])])
    assert unequal["macro"] == pytest.approx(math.exp(2.5))
    assert unequal["micro"] == pytest.approx(math.exp(3.25))


@pytest.fixture(scope="module")
def engine() -> Engine:
    return outrider.load(dtype="float32", device="cpu")


def test_distributions_equal_those_of_forward_passes_from_scratch(engine: Engine) -> None:
    """Along the target's own samples, warped as in sampling."""
    assert engine.draft is not None
    prompts = [engine.encode("def f(x):\n"), engine.encode("import os, sys")]
    sampling = Sampling(temperature=0.7, top_p=0.9, max_new_tokens=5, seed=4)
    p_KV, q_KV = paired_distributions(engine.target, engine.draft, prompts, sampling, 9)
    assert p_KV.shape == q_KV.shape == (9, engine.target.num_tokens)
    plain = Engine(engine.target, None, METHODS["plain"])
    results = plain.generate(prompts, sampling)
    row = 0
    for model, probs_KV in ((engine.target, p_KV), (engine.draft, q_KV)):
        row = 0
        for result in results:
            ids = torch.tensor([[*result.prompt_ids, *result.token_ids]])
            with torch.inference_mode():
                logits_TV = model.module(input_ids=ids).logits[0].float() / 0.7
            for t in range(len(result.token_ids)):
                full_V = logits_TV[len(result.prompt_ids) - 1 + t].softmax(-1)
                if row < 9:
                    kept_V = probs_KV[row] > 0
                    assert float(full_V[kept_V].sum()) >= 0.9
                    expected_V = full_V * kept_V / full_V[kept_V].sum()
                    assert torch.allclose(probs_KV[row], expected_V, atol=1e-4)
                row += 1
    assert row == 10


# ------------------------------------------------------------------------------------- figure


def row(name: str, speed: float, perplexity: float) -> dict[str, Any]:
    return {
        "name": name,
        "method": name.split()[0],
        "lossless": name in ("plain", "speculative"),
        "speedup": {"median": speed, "lowest": speed - 0.1, "highest": speed + 0.1},
        "perplexity": {"macro": perplexity, "error": 0.3},
    }


@pytest.fixture(scope="module")
def document(plane: Plane) -> dict[str, Any]:
    settings = run_metadata(
        target="big", draft="small", dtype="float32", temperature=0.8, positions=12,
        num_speculative_tokens=5,
    )  # fmt: skip
    generations = [
        row("plain", 1, 7), row("speculative", 1.5, 7.1), row("mentored 0.2", 1.52, 7.15),
        row("ensemble 0.3", 1.51, 7.05), row("typical 0.09", 1.5, 7.0),
    ]  # fmt: skip
    document = {"about": settings, "plane": plane.as_dict(), "generations": generations}
    return dict(json.loads(dumps(document)))  # as read back from a file


def texts_of(path: Path) -> str:
    root = ElementTree.fromstring(path.read_text(encoding="utf-8"))
    return "\n".join(text for element in root.iter() for text in _lines(element))


def _lines(element: ElementTree.Element) -> Iterator[str]:
    if element.tag.endswith("text"):
        yield "".join(element.itertext()).strip()


def test_the_figure_has_every_label(document: dict[str, Any], tmp_path: Path) -> None:
    svg, png = plots.frontier(document, tmp_path)
    assert png.read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    texts = texts_of(svg)
    for line in document["plane"]["lines"]:
        assert line["name"] in texts
    for each in document["generations"]:
        assert each["name"] in texts
    for label in ("per token", "speed-up", "perplexity", "accepted", "temperature 0.8", "big"):
        assert label in texts


def test_a_figure_without_generations_has_one_panel(
    document: dict[str, Any], tmp_path: Path
) -> None:
    svg, _ = plots.frontier({**document, "generations": []}, tmp_path)
    assert "perplexity" not in texts_of(svg)
    assert "mentored chi2" in texts_of(svg)


def test_equal_documents_give_equal_files(document: dict[str, Any], tmp_path: Path) -> None:
    once, again = tmp_path / "once", tmp_path / "again"
    for folder in (once, again):
        folder.mkdir()
        plots.frontier(document, folder)
    for name in ("frontier.svg", "frontier.png"):
        assert (once / name).read_bytes() == (again / name).read_bytes()


def test_the_axis_is_total_variation_where_kl_is_mostly_infinite() -> None:
    def line(*kls: object) -> dict[str, Any]:
        return {"points": [{"kl": kl, "tv": 0.1, "acceptance": 0.9} for kl in kls]}

    assert plots.x_axis([line(0.1, 0.2, "inf")]) == "kl"
    assert plots.x_axis([line(0.1, "inf", "inf")]) == "tv"


def test_the_legend_counts_infinite_points(document: dict[str, Any], tmp_path: Path) -> None:
    lines = [dict(line) for line in document["plane"]["lines"]]
    for name in ("kl", "tv"):
        lines[-1]["points"] = [{**p, name: "inf"} for p in lines[-1]["points"]]
    svg, _ = plots.frontier({**document, "plane": {"lines": lines}}, tmp_path)
    number = len(lines[-1]["points"])
    assert f"{lines[-1]['name']} ({number} of {number} infinite)" in texts_of(svg)


def test_json_has_no_infinities() -> None:
    text = dumps({"a": [1.5, math.inf, (math.nan, {"b": -math.inf})]})
    assert json.loads(text) == {"a": [1.5, "inf", ["nan", {"b": "-inf"}]]}

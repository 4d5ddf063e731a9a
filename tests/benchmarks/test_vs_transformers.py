"""The benchmark against transformers: equal work for all, the page, and the README's table."""

import json
from typing import Any

import pytest
from tiny_models import tiny_module

from benchmarks.vs_transformers import configurations, markdown, measure, ratios
from outrider.runtime import HFModel
from scripts.fill_results import BEGIN, END, filled

PROMPTS = [[1, 2, 3], [4, 5], [6]]
TOKENS = 6


@pytest.fixture(scope="module")
def report() -> dict[str, Any]:
    target, draft = HFModel(tiny_module(seed=1)), HFModel(tiny_module(seed=2))
    temperatures = {}
    for temperature in (0.0, 0.8):
        rows = measure(configurations(target, draft, temperature, [2, 5], TOKENS), PROMPTS, 2)
        temperatures[str(temperature)] = {"rows": rows, "ratios": ratios(rows, [2, 5])}
    about = dict.fromkeys(
        ("date", "hardware", "threads", "dtype", "torch", "transformers", "command"), "x"
    )
    return {"about": about | {"repeats": 2, "max_new_tokens": TOKENS}, "temperatures": temperatures}


def test_all_configurations_emit_the_same_number_of_tokens() -> None:
    target, draft = HFModel(tiny_module(seed=1)), HFModel(tiny_module(seed=2))
    for temperature in (0.0, 0.8):
        for configuration, count in configurations(target, draft, temperature, [2, 5], TOKENS):
            prompts = [PROMPTS[i % len(PROMPTS)] for i in range(count)]
            assert configuration(prompts, seed=0).tokens == count * TOKENS, configuration.name


def test_the_page_has_every_row_and_ratio(report: dict[str, Any]) -> None:
    page = markdown(report)
    for part in report["temperatures"].values():
        assert all(f"| {name} |" in page for name in part["rows"])
        assert all(f"| {name} |" in page for name in part["ratios"])
    assert json.loads(json.dumps(report)) == report


def test_the_readme_is_changed_only_between_its_markers(report: dict[str, Any]) -> None:
    once = filled(f"before\n{BEGIN}\nafter\n", report)
    assert once.startswith("before\n")
    assert once.endswith("after\n")
    assert once.index(BEGIN) < once.index("transformers assisted γ=5") < once.index(END)
    assert filled(once, report) == once

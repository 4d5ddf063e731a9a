"""Drafts by copying: costs, their page, the prompts; and speeds in interleaved repeats."""

import json
import re

import pytest
from tiny_models import engine_of, greedy, ragged_prompts, tiny

from benchmarks.copy_cost import bars, configurations, cost, markdown
from benchmarks.copy_prompts import KINDS, _begun, _renamed, prompts
from benchmarks.memory_speeds import Task, gain

TEXT = [(7 * n + n // 9) % 23 for n in range(700)]


@pytest.mark.parametrize("rows", [1, 3])
def test_costs_are_measured_along_the_text(rows: int) -> None:
    for configuration in configurations(TEXT[:200]):
        row = cost(configuration, TEXT, 400, rows)
        assert 0 < row["5th"] <= row["lower_quartile"] <= row["median"] <= row["95th"]
        assert 0 < row["accepted"] <= row["drafted"] <= configuration.num_tokens
        assert row["rounds"] * (1 + row["accepted"]) == pytest.approx(300 - 53 * rows, abs=70)
        assert row["bytes"] > 4


def test_gains_are_ratios_to_plain_decoding() -> None:
    target = tiny("llama", std=0.12)
    engines = {
        "plain": engine_of(target),
        "prompt lookup": engine_of(target, None, "prompt-lookup"),
    }
    loop = {position: position % 4 for position in range(30)}
    work = [Task(tuple(prompt), greedy(30, forced=loop)) for prompt in ragged_prompts([4, 9])]
    rows = gain(engines, work, 2)
    assert rows["plain"]["ratio"] == 1
    assert rows["plain"]["acceptance_length"] == 1
    assert rows["prompt lookup"]["acceptance_length"] > 2


def test_the_page_has_all_costs() -> None:
    (configuration, *_) = configurations([])
    costs = [{"name": configuration.name} | cost(configuration, TEXT, 500, 1)]
    about = dict.fromkeys(("date", "hardware", "threads", "torch", "command"), "x")
    report = {"about": about | {"context": 500}, "cost": costs}
    page = markdown(report)
    assert f"| {configuration.name} |" in page
    assert all(f"| {text} |" in page for text, _, _ in bars(costs))
    assert json.loads(json.dumps(report)) == report


def test_a_copy_begins_in_the_prompt_and_ends_in_the_reference() -> None:
    source = "def f(a, b):\n    c = a + b\n    return c\n"
    prompt = _begun(source, _renamed(source, "c"))
    assert prompt.text == source + "\n\n\ndef f(a, b):\n    c_new = a + b\n"
    assert prompt.reference == "    return c_new\n"


@pytest.mark.slow
def test_every_kind_of_text_has_prompts() -> None:
    """Reads the standard library, some 600 files."""
    for kind in KINDS:
        found = prompts(kind, 4)
        assert len(found) == len({prompt.text for prompt in found}) == 4
        assert all(bool(prompt.reference) == (kind in ("edit", "repeat")) for prompt in found)
        if kind == "free":
            assert not any(re.search(r"^\s*def ", prompt.text) for prompt in found)

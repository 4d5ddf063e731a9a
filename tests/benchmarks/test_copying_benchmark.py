"""The benchmark of copying drafts measures what it says, and its prompts are what they say."""

import json
import re

import pytest
from tiny_models import engine_of, greedy, ragged_prompts, tiny

from benchmarks.copy_cost import contenders, cost
from benchmarks.copy_prompts import KINDS, _begun, _renamed, prompts
from benchmarks.copying import Task, bars, gain, markdown

TEXT = [(7 * n + n // 9) % 23 for n in range(700)]


@pytest.mark.parametrize("rows", [1, 3])
def test_costs_are_taken_along_the_text(rows: int) -> None:
    for contender in contenders(TEXT[:200]):
        row = cost(contender, TEXT, 400, rows)
        assert 0 < row["5th"] <= row["lower_quartile"] <= row["median"] <= row["95th"]
        assert 0 < row["accepted"] <= row["drafted"] <= contender.num_tokens
        assert row["rounds"] * (1 + row["accepted"]) == pytest.approx(300 - 53 * rows, abs=70)
        assert row["bytes"] > 4


def test_gains_are_ratios_to_plain_and_the_page_has_them_all() -> None:
    target = tiny("llama", std=0.12)
    engines = {
        "plain": engine_of(target),
        "prompt lookup": engine_of(target, None, "prompt-lookup"),
    }
    loop = {place: place % 4 for place in range(30)}
    work = [Task(tuple(prompt), greedy(30, forced=loop)) for prompt in ragged_prompts([4, 9])]
    rows = gain(engines, work, 2)
    assert rows["plain"]["ratio"] == 1
    assert rows["plain"]["acceptance_length"] == 1
    assert rows["prompt lookup"]["acceptance_length"] > 2
    (contender, *_) = contenders([])
    costs = [{"name": contender.name} | cost(contender, TEXT, 500, 1)]
    names = "date hardware threads torch dtype texts tokens repeats note command"
    about = dict.fromkeys(names.split(), "x") | {"temperature": 0.0, "context": 500}
    report = {"about": about, "cost": costs, "gain": dict.fromkeys(KINDS, rows)}
    page = markdown(report)
    assert all(f"| {name} |" in page for name in (contender.name, *rows))
    assert all(f"| {text} |" in page for text, _, _ in bars(report))
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

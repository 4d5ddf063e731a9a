"""The benchmark of joint decoding: bars, perplexity, prompts, the page and the figure."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from tiny_models import engine_of, full_logits, ragged_prompts, tiny

from benchmarks.joint import (
    BLOCKS,
    MJSD,
    SAMPLING,
    SPECULATIVE,
    UNTRUNCATED,
    WARPED,
    bars,
    continued,
    draw,
    markdown,
    mjgd,
    quality,
)


def report(accepted: float, perplexity: float, blocks: list[float]) -> dict[str, Any]:
    """A report in which speculative accepts one token per round and sampling has perplexity 3."""

    def row(name: str) -> dict[str, Any]:
        return {
            "accepted_per_round": accepted if name == MJSD else 1.0,
            "tokens_per_round": 2.0,
            "perplexity": perplexity if name == MJSD else 3.0,
            "spread": 0.1,
            "tokens_per_second": 10.0,
            "speed_ratio": 1.0,
            "speed_ratio_spread": [0.9, 1.1],
        }

    words = "date hardware threads dtype torch prompts tokens seeds timed repeats note command"
    return {
        "about": dict.fromkeys(words.split(), "x"),
        "warped": {c.name: row(c.name) for c in WARPED},
        "untruncated": {c.name: row(c.name) for c in UNTRUNCATED},
        "mjgd": {str(K): {"perplexity": p} for K, p in zip(BLOCKS, blocks, strict=True)},
    }


def test_bars_are_met_and_missed() -> None:
    assert [met for _, _, met in bars(report(1.5, 2.9, [1.6, 1.5, 1.5, 1.4]))] == [True] * 5
    assert [met for _, _, met in bars(report(1.4, 3.1, [1.6, 1.7, 1.5, 1.4]))] == [False] * 5


def test_the_page_and_the_figure_show_all_results(tmp_path: Path) -> None:
    found = report(1.5, 2.9, [1.6, 1.5, 1.5, 1.4])
    page = markdown(found)
    assert all(f"| {configuration.name} |" in page for configuration in WARPED)
    assert all(f"| {text} |" in page for text, _, _ in bars(found))
    assert json.loads(json.dumps(found)) == found
    draw(found, tmp_path / "joint.svg")
    assert "greedy decoding" in (tmp_path / "joint.svg").read_text()
    assert {SAMPLING, SPECULATIVE, MJSD} == {c.name for c in UNTRUNCATED}


def test_perplexity_is_the_targets_own() -> None:
    """Against full forward passes: the mean over each output first, then over outputs."""
    model, prompts = tiny(std=0.15), ragged_prompts([5, 2])
    configuration, engine = mjgd(1), engine_of(tiny(std=0.15))
    found = quality(configuration, engine, prompts, 6, 3)
    logs = []
    for result in engine.generate(prompts, configuration.sampling(6, 0)):
        text = [*result.prompt_ids, *result.token_ids]
        own_TV = full_logits(model.module, text).log_softmax(-1)
        positions = range(len(result.prompt_ids) - 1, len(text) - 1)
        logs.append(sum(float(own_TV[t, text[t + 1]]) for t in positions) / 6)
    assert found["perplexity"] == pytest.approx(math.exp(-sum(logs) / 2), rel=1e-4)
    assert (found["tokens_per_round"], found["spread"]) == (
        1.0,
        None,
    )  # one seed, as there is no randomness


def test_prompts_are_continued() -> None:
    longer = continued(engine_of(tiny()), ragged_prompts([5, 2]))  # type: ignore[arg-type]
    assert [len(ids) for ids in longer] == [29, 26] * 3
    assert len({tuple(ids) for ids in longer}) == 6

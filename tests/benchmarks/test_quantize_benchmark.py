"""The benchmark of quantized weights: bytes, the bar, and the page."""

from typing import Any

import pytest
from tiny_models import tiny_module

from benchmarks.quantize import (
    KINDS,
    PAIRS,
    held_out,
    markdown,
    of_kind,
    quality_of,
    quality_page,
    size,
    verdict,
)
from outrider import assets
from outrider.runtime import load_tokenizer


def _report(int8_seconds: float, int8_alpha: float) -> dict[str, Any]:
    seconds = {"none": 0.002, "int8": int8_seconds, "int4": 0.001, "torchao int8": 0.004}
    rows = [
        {"kind": kind, "bytes": 4e6, "seconds": {"1": each, "6": 2 * each}}
        for kind, each in seconds.items()
    ]
    about = ("date", "hardware", "threads", "torch", "torchao", "dtype", "repeats", "command")
    speed = {"tokens_per_second": 50.0, "spread": [49.0, 51.0], "acceptance_length": 2.0}
    return {
        "about": dict.fromkeys((*about, "tokens", "rounds"), "x"),
        "models": [{"name": "draft", "rows": rows}],
        "quality": {
            "places": 1234,
            "perplexity": {role: dict.fromkeys(KINDS, 9.5) for role in ("target", "draft")},
            "alpha": [
                {"target": p, "draft": q, "alpha": [0.6, int8_alpha if q == "int8" else 0.5]}
                for p in KINDS
                for q in KINDS
            ],
        },
        "speeds": [{"target": p, "draft": q} | speed for p, q in PAIRS],
    }


@pytest.mark.parametrize(
    ("seconds", "alpha", "said"),
    [
        (0.001, 0.49, "**met**, 2.00 times as fast, α 0.0100 apart"),
        (0.0018, 0.5, "**missed**, 1.11 times as fast, α 0.0000 apart"),
        (0.001, 0.46, "**missed**, 2.00 times as fast, α 0.0400 apart"),
    ],
)
def test_the_bar_needs_speed_and_alpha(seconds: float, alpha: float, said: str) -> None:
    assert said in verdict(_report(seconds, alpha))


def test_the_page() -> None:
    page = markdown(_report(0.001, 0.5))
    assert "| draft | int8 | 4.0 | 1.00 | 2.00 | 2.00 / 2.00 |" in page
    assert "| none | (plain) | 50.0 | 49.0-51.0 | 2.00 | 1.00 |" in page


@pytest.mark.parametrize("kind", ["int8", "torchao int8"])
def test_size_counts_what_is_stored(kind: str) -> None:
    pytest.importorskip("torchao")
    module = tiny_module()
    linear = sum(
        p.numel() for name, p in module.named_parameters() if p.ndim > 1 and "embed" not in name
    )
    saved = size(module) - size(of_kind(module, kind))
    assert 2.5 * linear < saved < 3 * linear  # three bytes of four, less the scales


def test_quality_of_one_model() -> None:
    """More bits are nearer; the model as its own draft is always accepted."""
    rows = quality_of(str(assets.draft_path()), rows=1)
    assert [row["kind"] for row in rows] == list(KINDS)
    alphas = {row["kind"]: row["alpha"][1] for row in rows}
    assert alphas["none"] == pytest.approx(1, abs=1e-5)
    assert 0.5 < alphas["int4:128"] < alphas["int8:32"] < 1
    assert rows[0]["bytes"] > rows[2]["bytes"] > rows[3]["bytes"]
    page = quality_page("folder/model", 255, rows)
    assert "# Quantized weights of model" in page
    assert "| none | " in page
    assert "| +0.00% | 1.0000 | 1.0000 |" in page


def test_held_out_rows_are_full() -> None:
    text_BT = held_out(load_tokenizer(assets.draft_path()), rows=2, length=64)
    assert text_BT.shape == (2, 64)
    assert not text_BT[0].equal(text_BT[1])

"""The benchmark of memory: what it measures, and its page."""

from typing import Any

import torch
from tiny_models import ragged_prompts, tiny

from benchmarks.memory import KINDS, error, markdown, rounds


def test_error_is_none_for_slabs_as_computed_and_grows_with_fewer_bits() -> None:
    target = tiny("llama", dtype=torch.float64)
    found = [error(target, kind, ragged_prompts([30, 30])) for kind in KINDS]
    assert found[0] == {"kl": 0.0, "kl_largest": 0.0, "agreement": 1.0, "places": 60}
    assert all(0 < each["kl"] < each["kl_largest"] < 1 for each in found[1:])


def test_memory_is_read_at_each_mark() -> None:
    found = rounds(20, kv_dtype="int8", max_memory="1MiB")
    assert list(found["resident"]) == [2, 10, 20]
    assert min(found["resident"].values()) > 10
    assert found["texts"] == 16


def test_the_page_shows_what_was_measured() -> None:
    speed = {"ratio": 0.9, "smallest_ratio": 0.8, "largest_ratio": 1.1, "acceptance_rate": 0.5}
    row: dict[str, Any] = {
        "target_bytes": 16384,
        "draft_bytes": 1024,
        "kl": 1e-5,
        "kl_largest": 2e-3,
        "agreement": 0.995,
        "places": 400,
        "plain": speed | {"tokens_per_second": 100.0},
        "speculative": speed,
    }
    keys = ("date", "hardware", "threads", "torch", "note", "command")
    slabs = {"dtype": "float32", "texts": 2, "tokens": 200, "repeats": 3}
    page = markdown(
        {
            "about": dict.fromkeys(keys, "x"),
            "slabs": slabs | {"kinds": dict.fromkeys(KINDS, row)},
            "rounds": {"as it comes": {"resident": {"1000": 400.0, "10000": 400.5}, "texts": 9}},
        }
    )
    assert "| int8 | 16,384 + 1,024 | 1.0e-05, 2.0e-03 | 99.50% of 400 | 0.90 (0.80-1.10)" in page
    assert "| engine | after 1,000 rounds | after 10,000 rounds | texts |" in page
    assert "| as it comes | 400.0 MiB | 400.5 MiB | 9 |" in page

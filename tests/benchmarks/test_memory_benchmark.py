"""The benchmark of memory: its measurements and its page."""

from typing import Any

import torch
from tiny_models import ragged_prompts, tiny

from benchmarks.memory import BUFFERS, KINDS, error, markdown
from benchmarks.memory_in_use import MemoryInUse
from benchmarks.memory_rounds import bounded, rounds


def test_only_kv_buffers_of_fewer_bits_have_an_error() -> None:
    target = tiny("llama", dtype=torch.float64)
    found = [error(target, kind, ragged_prompts([30, 30])) for kind in KINDS]
    assert found[0] == {"kl": 0.0, "kl_largest": 0.0, "agreement": 1.0, "places": 60}
    assert all(0 < each["kl"] < each["kl_largest"] < 1 for each in found[1:])


def test_memory_is_recorded_after_a_tenth_of_the_rounds() -> None:
    found = rounds(20, bounded())
    assert list(found["resident"]) == list(range(2, 21))
    assert min(found["resident"].values()) > 10
    assert found["range"] >= 0
    assert min(found["tensors"]) > 0
    assert min(found["other"]) > 0
    assert found["texts"] == 8


def test_tensors_are_told_from_other_memory() -> None:
    before = MemoryInUse.read()
    kept = torch.zeros(2**22)  # 16 MiB
    views = [kept[1:], kept.view(2, -1)]
    with_tensor = MemoryInUse.read()
    assert len(views) == 2
    assert abs(with_tensor.tensors - before.tensors - 16) < 0.1
    assert abs(with_tensor.other - before.other) < 1
    raw = bytearray(2**24)
    with_bytes = MemoryInUse.read()
    assert len(raw) == 2**24
    assert abs(with_bytes.tensors - with_tensor.tensors) < 0.1
    assert abs(with_bytes.other - with_tensor.other - 16) < 1


def test_the_page_shows_the_measurements() -> None:
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
    about = dict.fromkeys(("date", "hardware", "threads", "torch", "note"), "x")
    buffers = {"dtype": "float32", "texts": 2, "tokens": 200, "timed": 2, "repeats": 3}
    read = {str(done): 400 + done / 10_000 for done in range(1_000, 10_001, 500)}
    rounds_row = {"resident": read, "slope": -0.25, "range": 0.9, "texts": 9}
    rounds_row |= {"tensors": [5.5, 6.5], "other": [70.25, 70.5], "other_slope": 0.5}
    page = markdown(
        {
            BUFFERS: buffers
            | {"about": about | {"command": "A"}}
            | {"kinds": dict.fromkeys(KINDS, row)},
            "rounds": {"a pair": rounds_row | {"about": about | {"command": "B"}}},
        }
    )
    assert "| int8 | 16,384 + 1,024 | 1.0e-05, 2.0e-03 | 99.50% of 400 | 0.90 (0.80-1.10)" in page
    assert "Command: `A`" in page
    assert "### A pair\n\nx, x, x threads, torch x; x\n\nCommand: `B`" in page
    assert "| 1,000 rounds | 4,000 rounds | 7,000 rounds | 10,000 rounds | largest minus" in page
    assert "| 400.1 MiB | 400.4 MiB | 400.7 MiB | 401.0 MiB | 0.9 MiB | -0.2 KiB | 9 | 5.5" in page
    assert "| 5.5 and 6.5 MiB | 70.2 and 70.5 MiB | +0.5 KiB |" in page

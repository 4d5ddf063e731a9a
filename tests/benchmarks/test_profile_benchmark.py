"""The benchmark of profiles: its bars, and its page with the tables of the command line."""

from typing import Any

import pytest

from benchmarks.profile import bars, markdown


def case(outside: float, reached: float, speed: float) -> dict[str, Any]:
    """A profile with these numbers; all others are fixed."""
    floor = {"weights": 4e6, "keys_values": 1e6, "seconds": 0.001, "cached": False, "pass": 0.002}
    passes = {"count": 1.0, "tokens": 6.0, "context": 50.0, "seconds": 0.002}
    model = {
        "architecture": "Llama",
        "dtype": "float32",
        "pass_seconds": {"1": 0.002, "32": 12.5},
        "beta": {"1": 1.0, "32": 6250.0},
        "floors": {
            "alone": {**floor, "reached": 0.1, "pass": 5e6 / 2e10 / reached},
            "round": {**floor, "reached": 0.1},
        },
    }
    speedup = {"measured": speed, "lowest": speed, "highest": speed, "draft": 0.5, "c": 0.1}
    return {
        "name": "a pair",
        "command": "python -m benchmarks.profile --cases eager",
        "about": {
            "target": "big",
            "draft": "small",
            "hardware": "H",
            "threads": 2,
            "dtype": "f32",
            "compile": "off",
            "quantize_draft": "int8",
            "quantize_target": None,
            "versions": {"torch": "2"},
        },
        "run": {
            "method": "speculative",
            "num_speculative_tokens": 5,
            "temperature": 1.0,
            "rounds": 3,
            "tokens": 9,
            "prompt_tokens": 4,
            "acceptance_length": 3.0,
            "alpha": 0.7,
            "tokens_per_second": 20.0,
            "plain_tokens_per_second": 10.0,
        },
        "phases": {
            "seconds": 0.004,
            "outside_passes": outside,
            "groups": {"draft": 0.002, "target": 0.002},
            "phases": [{"group": "target", "phase": "pass", "seconds": 0.002}],
            "passes": {"target": passes, "draft": passes},
        },
        "profiler": {"span_seconds": 1e-6, "spans_share": 0.001, "recorded_over_unrecorded": 1.0},
        "memory": {
            "num_bytes": 2**29,
            "median": 2e10,
            "lowest": 1e10,
            "highest": 3e10,
            "matrix_vector": 1e10,
            "last_level_cache": 2**25,
        },
        "models": {"target": model, "draft": model},
        "speedup": {
            **speedup,
            "beta": 1.5,
            "expected_tokens": 2.9,
            "tokens": 3.0,
            "by_alpha": 2.0,
            "by_tokens": 1.0,
            "reached_by_alpha": speed / 2,
            "reached_by_tokens": speed,
        },
    }


@pytest.mark.parametrize(
    ("numbers", "met"),
    [
        ((0.1, 0.501, 1.84), [True, True, True, True]),
        ((0.11, 0.499, 0.91), [False, False, False, False]),
        ((0.05, 0.8, 1.0), [True, True, False, True]),
    ],
)
def test_bars(numbers: tuple[float, float, float], met: list[bool]) -> None:
    assert [held for _, _, held in bars(case(*numbers))] == met


def test_the_page() -> None:
    page = markdown({"cases": [case(0.1, 0.75, 1.84)]})
    for text in (
        "## a pair",
        "Command: `python -m",
        "draft in int8",
        "measured / formula 0.92",
        "| yes |",
    ):
        assert text in page
    assert "…" not in page
    tables = page.split("```")[1]
    assert max(map(len, tables.splitlines())) <= 80

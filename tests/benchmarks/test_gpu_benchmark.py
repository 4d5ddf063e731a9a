"""The GPU benchmark: a rehearsal on the CPU, set acceptance, traces, and the page."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny
from transformers import AutoModelForCausalLM

from benchmarks import page as pages
from benchmarks.gpu import REHEARSAL, main
from benchmarks.gpu_configurations import Configuration, configurations, measure
from benchmarks.gpu_page import markdown
from benchmarks.gpu_rounds import FREE, Chance, Work
from benchmarks.gpu_shapes import DRAFTS, LLAMA_7B, LLAMA_13B, SMOLLM2, Llama
from benchmarks.gpu_trace import ROUND, activity
from outrider import Engine


def test_a_rehearsal_measures_all_kinds(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["--device", "cpu", "--shapes", "tiny", "--batches", "2", "--out", str(tmp_path)])
    report = json.loads((tmp_path / "gpu.json").read_text())
    assert report["notes"] == []
    rows = report["rows"]
    kinds = [(row["kind"], row["temperature"]) for row in rows]
    assert kinds == [
        *(("plain", 0.0), ("free", 0.0), ("set", 0.0), ("transformers", 0.0)),
        *(("plain", 0.0), ("plain", 1.0), ("synthetic", 0.0), ("real", 0.0), ("real", 1.0)),
        ("transformers", 0.0),
    ]
    assert not any("failed" in row for row in rows)
    plain, free, drafted, theirs = rows[:4]
    assert plain["acceptance_length"] == 1
    assert plain["speedup"] == 1
    assert list(free["passes"]) == ["target"]
    assert set(drafted["passes"]) == {"target", "draft"}
    assert drafted["passes"]["target"]["tokens"] == 3
    assert drafted["passes"]["draft"]["count"] == 2
    assert theirs["tokens_per_second"] > 0
    assert (tmp_path / "gpu.md").read_text() in capsys.readouterr().out


def test_a_rehearsal_with_weights_of_few_bits(tmp_path: Path) -> None:
    arguments = "--device cpu --shapes tiny --batches 2 --quantize int8:32 --out".split()
    main([*arguments, str(tmp_path)])
    rows = json.loads((tmp_path / "gpu.json").read_text())["rows"]
    assert not any("failed" in row or row["kind"].startswith("transformers") for row in rows)
    assert {row["target"].rpartition(", ")[2] for row in rows} == {"int8:32"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--device", "cuda:99"], "CUDA devices here"),
        (["--device", "cpu"], "--shapes 7b 13b smollm2 embedded: these are for a GPU"),
    ],
)
def test_options_that_need_a_gpu_raise_an_error(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        main(arguments)
    message = capsys.readouterr().err
    assert said in message
    assert "--device cpu --shapes tiny" in message


def test_shapes_have_the_number_of_parameters_in_their_names() -> None:
    sizes = []
    for each in (LLAMA_7B, LLAMA_13B, *DRAFTS, SMOLLM2):
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(each.config())
        sizes.append(sum(p.numel() for p in model.parameters()))
    assert [round(size / 1e6) for size in sizes] == [6738, 13016, 68, 162, 1100, 135]


def test_acceptance_is_as_set() -> None:
    target = tiny("llama")
    for rate, length in ((1.0, 4.0), (0.0, 1.0)):
        engine = Engine(target, None, FREE, num_speculative_tokens=3, verifier=Chance(rate))
        found = Work(engine, [[1, 2], [3, 4, 5]]).timed(2)
        assert found.stats.acceptance_length == length
        assert found.tokens == 2 * 2 * length
        assert len(found.seconds) == 2


def test_a_failure_is_reported_and_the_others_continue() -> None:
    shape = Llama("short", 16, 1, 2, 2, 16, context=80, vocabulary=32)
    model = shape.build(torch.device("cpu"), torch.float32)
    entries = list(configurations(model, [], False, 1, REHEARSAL))
    assert [type(each) for each in entries] == [Configuration] * 2
    rows = {row["kind"]: row for row in measure(entries, REHEARSAL, 1e9)}
    assert "failed" not in rows["plain"]
    assert "the context of 80 tokens is full" in rows["free"]["failed"]


def event(cat: str, name: str, begin: float, length: float) -> dict[str, Any]:
    return {"ph": "X", "cat": cat, "name": name, "ts": begin, "dur": length}


ONE_ROUND = [
    event("user_annotation", ROUND, 1000, 1000),
    event(
        "gpu_user_annotation", ROUND, 1000, 1000
    ),  # the device's copy of the annotation is not work
    event("cuda_runtime", "cudaLaunchKernel", 1010, 5),
    event("cuda_driver", "cuLaunchKernelEx", 1020, 5),
    event("kernel", "gemm", 1100, 200),
    event("kernel", "softmax", 1250, 150),  # overlaps by 50
    event("gpu_memcpy", "Memcpy DtoH (Device -> Pageable)", 1500, 100),
    event("cuda_runtime", "cudaStreamSynchronize", 1450, 150),
    event("kernel", "of no round", 5000, 100),
    {"ph": "s", "cat": "ac2g", "name": "arrow", "ts": 1010},
]


def test_gaps_launches_and_waits_of_a_trace() -> None:
    found = activity(ONE_ROUND)
    assert found is not None
    assert found.as_dict() == {
        "round_ms": 1.0,
        "busy_ms": 0.4,
        "kernels": 2.0,
        "launches": 2.0,
        "waits": {"cudaStreamSynchronize": 1.0},
        "copies": {"Memcpy DtoH (Device -> Pageable)": 1.0},
        "gaps_under_profiler": 0.6,
    }
    assert activity(ONE_ROUND[:1]) is None


def test_the_page_shows_gaps_waits_and_failures() -> None:
    found = activity(ONE_ROUND)
    assert found is not None
    where = {"target": "big", "compile": "auto", "batch": 4, "gamma": 5, "temperature": 0.0}
    taken = {"ms": 9.0, "count": 1.0, "tokens": 6.0, "floor_ms": 4.5, "of_floor": 0.5}
    row = where | {
        "kind": "set",
        "draft": "small",
        "tokens_per_second": 123.4,
        "slowest": 120.0,
        "fastest": 125.0,
        "speedup": None,
        "acceptance_length": 3.5,
        "round_ms": 12.0,
        "of_floor": 0.4,
        "passes": {"target": taken},
        "gaps": 0.25,
        "activity": found.as_dict(),
        "sync_places": {"outrider/engine/running_batch.py:9": 1.0},
    }
    settings = dict.fromkeys(("device", "cuda", "rounds", "repeats", "acceptance"), "x")
    about = pages.about("c", **settings)
    memory = {"median": 3e12, "lowest": 2e12, "highest": 4e12}
    rows = [row, where | {"kind": "free", "draft": "", "failed": "out of memory"}]
    report = {"about": about, "memory": memory, "rows": rows, "notes": ["one"]}
    page = markdown(report)
    assert "| small | set | 5 | 0 | 123.4 | 120.0–125.0 | – | 3.50 | 12.00 | 0.40 | 9.00" in page
    assert "| 25% | 2 | 2 | 1.0 |" in page
    assert "failed: out of memory" in page
    assert "| outrider/engine/running_batch.py:9 | 1.00 |" in page
    assert page.endswith("## Notes\n\n- one\n")
    tables = [line.count("|") for line in page.splitlines() if line.startswith(("| small", "| –"))]
    assert len(set(tables)) == 1

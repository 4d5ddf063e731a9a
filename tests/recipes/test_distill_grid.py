"""The grid of divergences and data: its statistics, and a small one from end to end."""

import json
from pathlib import Path

import numpy as np
import pytest
from tiny_distillation import save_target

from outrider.train.distill.measure import Acceptance
from outrider.train.distill.run import distil
from recipes import distill_grid
from recipes.distill_grid import (
    BASELINE,
    COMPARED,
    DATA,
    DIVERGENCES,
    compared,
    interval,
    main,
    resampled,
    write_results,
)

CELLS = [BASELINE, *((divergence, data) for divergence in DIVERGENCES for data in DATA)]
SMALL = (
    "--device cpu --dtype float32 --steps 4 --rows 1 --length 32 --prompt-tokens 8 --held-out 3 "
    "--refresh-every 2 --refresh-prompts 4 --width 16 --max-prompts 12"
)


def acceptance(seed: int, better: float = 0.0, prompts: int = 40) -> Acceptance:
    """α of about 0.5 + `better`, which differs between prompts in the same way for all seeds."""
    generator = np.random.default_rng(seed)
    level = np.random.default_rng(0).uniform(0.2, 0.8, prompts)
    counts = np.full(prompts, 50)
    sums = counts * (level + better + generator.normal(0, 0.01, prompts))
    alpha = float(sums.sum() / counts.sum())
    return Acceptance(1.0, alpha, 2.0, 0.5, tuple(sums), tuple(counts.tolist()))


def test_intervals_have_the_width_of_the_standard_error() -> None:
    at = acceptance(1)
    rates = np.array(at.sums) / np.array(at.counts)
    error = rates.std() / len(rates) ** 0.5
    low, high = interval(resampled(at.counts, at.sums))
    assert low < at.alpha < high
    assert (high - low) / (2 * 1.96 * error) == pytest.approx(1, abs=0.1)


def test_long_answers_weigh_more() -> None:
    values = resampled((1, 99), (1.0, 0.0))
    assert values.min() == 0
    assert values.mean() < 0.5


def test_differences_are_paired() -> None:
    """Prompts differ far more than cells, so unpaired intervals would contain zero."""
    measured = {BASELINE: acceptance(1), COMPARED: acceptance(2, better=0.03)}
    found = compared(measured, {BASELINE: 700, COMPARED: 800}, COMPARED)
    assert (found["tokens"], found["baseline_tokens"]) == (800, 700)
    assert found["difference"] == pytest.approx(0.03, abs=0.01)
    assert 0 < found["low"] < found["difference"] < found["high"] < 0.05
    assert found["baseline"] == "cross-entropy on ground-truth"


def test_results_are_written_as_table_document_and_figure(tmp_path: Path) -> None:
    measured = {cell: acceptance(number, better=number / 100) for number, cell in enumerate(CELLS)}
    write_results(measured, dict.fromkeys(CELLS, 1000), tmp_path, target="toy")
    document = json.loads((tmp_path / "grid.json").read_text())
    assert len(document["cells"]) == 17
    assert document["about"]["target"] == "toy"
    assert [each["distilled"] for each in document["differences"]] == [
        "forward-kl on target",
        "tv on mixture",
    ]
    table = (tmp_path / "grid.md").read_text()
    for number, cell in enumerate(CELLS):
        assert f"{measured[cell].alpha:.3f} [" in table, number
    for name in ("grid.png", "grid.svg"):
        assert (tmp_path / name).stat().st_size > 5000


def test_a_small_grid_resumes_cell_by_cell(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distill_grid, "DIVERGENCES", ("forward-kl",))
    monkeypatch.setattr(distill_grid, "DATA", ("ground-truth", "target"))
    target = save_target(tmp_path / "target")
    folder = tmp_path / "texts"
    folder.mkdir()
    for number in range(8):
        (folder / f"{number}.txt").write_text(f"def f{number}(x):\n    return x + {number}\n" * 8)
    out = tmp_path / "out"
    arguments = [f"--out={out}", f"--target={target}", f"--prompts={folder}", *SMALL.split()]
    made = []

    def second_fails(run, *others):
        if len(made) == 1:
            raise KeyboardInterrupt
        made.append(run.out.name)
        return distil(run, *others)

    with monkeypatch.context() as patch:
        patch.setattr(distill_grid, "distil", second_fails)
        with pytest.raises(KeyboardInterrupt):
            main(arguments)
    checkpoint = out / "cells" / made[0] / "checkpoint.pt"
    before = checkpoint.stat().st_mtime_ns
    main(arguments)
    assert checkpoint.stat().st_mtime_ns == before
    document = json.loads((out / "grid.json").read_text())
    names = [(cell["divergence"], cell["data"]) for cell in document["cells"]]
    assert names == [BASELINE, ("forward-kl", "ground-truth"), ("forward-kl", "target")]
    assert all(cell["low"] <= cell["alpha"] <= cell["high"] for cell in document["cells"])
    assert all(cell["tokens"] > 0 for cell in document["cells"])

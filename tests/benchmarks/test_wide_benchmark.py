"""The benchmark of wide forward passes: it measures a tiny model, and keeps other processors'
sections."""

from pathlib import Path

import pytest
from tiny_models import tiny_module

from benchmarks.wide import measure, written
from outrider import load_model
from outrider.runtime import HFModel
from outrider.runtime.kernels import build

pytestmark = pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")


def test_sections_stand_side_by_side(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def load(source: str, **_: object) -> HFModel:
        return load_model(tiny_module())

    monkeypatch.setattr("benchmarks.wide.load_model", load)
    monkeypatch.setattr("benchmarks.wide.prepare", lambda *_, **__: None)
    section = measure("models/tiny", [1, 3], [5], 1, 0.01)
    assert {row["tokens"] for row in section["layers"]} == {1, 3}
    assert all(speed > 0 for row in section["layers"] for speed in row["speeds"].values())
    written(tmp_path, "one", section)
    page = written(tmp_path, "other", section)
    assert page.count("\n## ") == 2
    assert page.count("| bfloat16 | 5 |") == 2
    assert page.count("Command: `python -m benchmarks.wide --model models/tiny --tokens 1 3") == 2

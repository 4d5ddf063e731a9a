"""The recipe of a Mamba-2 and its draft model, from sources to measurement, with tiny models."""

import json
from pathlib import Path

import pytest

from recipes.mamba2_pair import main


@pytest.mark.slow
def test_all_stages_run_and_are_skipped_the_second_time(tmp_path: Path) -> None:
    for _ in range(2):
        main(["--out", str(tmp_path), "--smoke"])
        found = json.loads((tmp_path / "measured.json").read_text())
        assert 0 <= found["acceptance rate"] <= 1
        assert found["speed-up"] > 0
    assert (tmp_path / "draft" / "model" / "model.safetensors").exists()

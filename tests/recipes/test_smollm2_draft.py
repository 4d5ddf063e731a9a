"""The recipe of the small draft: its size, and a run from end to end on a tiny target."""

import json
from pathlib import Path

import pytest
from tiny_distillation import save_target

from outrider import load
from outrider.train.distill.settings import Measuring
from outrider.train.distill.shape import Shape
from recipes import smollm2_draft

SMOLLM2_TOKENS = 49_152


def test_the_draft_fits_beside_the_head_in_the_package() -> None:
    """40 MB for both: the head takes 19.8 MB, the draft's tokenizer 3.6 MB."""
    assert 2 * smollm2_draft.SHAPE.read(SMOLLM2_TOKENS) < 16.6e6


def test_a_run_ends_with_a_folder_that_drafts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(smollm2_draft, "SHAPE", Shape(1, 16))
    monkeypatch.setattr(smollm2_draft, "LENGTH", 64)
    monkeypatch.setattr(smollm2_draft, "MEASURING", Measuring(prompts=2, tokens=8))
    target, data = save_target(tmp_path / "target"), tmp_path / "data.jsonl"
    messages = [
        [{"role": "user", "content": f"def f{i}(x):"}, {"role": "assistant", "content": "return x"}]
        for i in range(24)
    ]
    data.write_text("".join(json.dumps({"messages": each}) + "\n" for each in messages))
    smollm2_draft.main(
        [f"--target={target}", f"--data={data}", f"--out={tmp_path / 'out'}", "--steps=3"]
    )
    best = tmp_path / "out" / "1x16" / "best"
    assert (best / "README.md").read_text().count("python -m recipes.smollm2_draft") == 1
    result = load(str(target), str(best)).generate("def f(x):")
    assert result.stats.drafted > 0

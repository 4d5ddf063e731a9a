"""``outrider train --pairs``: a T5 and its draft from a file of pairs, and errors."""

import json

import pytest
from typer.testing import CliRunner

import outrider
from outrider.cli import app
from outrider.train.run_pairs import read_pairs, split_pairs

SHAPE = ["--vocab-size", "290", "--layers", "1", "--hidden", "16", "--ffn", "16", "--heads", "2"]
RUN = ["--steps", "3", "--batch", "8", "--length", "24", "--no-tensorboard"]


def call(*arguments: object):
    return CliRunner().invoke(app, ["train", *map(str, arguments)])


@pytest.fixture
def file(tmp_path):
    path = tmp_path / "pairs.jsonl"
    lines = [{"source": f"def f{i}(a=1)", "text": f"f{i}(a)"} for i in range(90)]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


def test_a_target_then_its_draft(tmp_path, file) -> None:
    target, draft = tmp_path / "target", tmp_path / "draft"
    done = call("--out", target, "--pairs", file, *SHAPE, *RUN)
    assert done.exit_code == 0, done.stderr
    done = call("--out", draft, "--pairs", file, "--teacher", target / "model", *SHAPE, *RUN)
    assert done.exit_code == 0, done.stderr
    engine = outrider.load(target / "model", draft / "model", dtype="float32", device="cpu")
    result = engine.generate("def f3(a=1)", outrider.Sampling(temperature=0, max_new_tokens=4))
    assert 1 <= len(result.token_ids) <= 4
    again = call("--out", target, "--pairs", file, *SHAPE, *RUN)
    assert "resuming after step 3" in again.stderr


def test_held_out_texts_are_in_no_training_pair(file) -> None:
    splits = split_pairs(read_pairs(file) * 2)
    held_out = {text for _, text in splits["val"]}
    assert held_out
    assert not held_out & {text for _, text in splits["train"]}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ('{"source": "a"}\n', "line 1: not a pair; each line"),
        ('{"source": "a", "text": "b"}\nnonsense\n', "line 2: not a pair"),
        ("é\n", "pairs.jsonl is not UTF-8 text (byte 0); convert it first"),
        ("", "holds no pairs"),
        ('{"source": "a", "text": "b"}\n', "1 pairs are too few for batches of 8"),
    ],
)
def test_files_without_enough_pairs(tmp_path, content: str, message: str) -> None:
    path = tmp_path / "pairs.jsonl"
    path.write_text(content, encoding="latin-1")
    done = call("--out", tmp_path / "out", "--pairs", path, *SHAPE, *RUN)
    assert done.exit_code == 2
    assert message in done.stderr
    assert len(done.stderr.strip().splitlines()) <= 2


def test_incompatible_options(tmp_path, file) -> None:
    done = call("--out", tmp_path, "--pairs", file, "--package", "python-stdlib")
    assert (done.exit_code, "--pairs cannot be combined" in done.stderr) == (2, True)
    done = call("--out", tmp_path, "--pairs", tmp_path / "none.jsonl", *SHAPE, *RUN)
    assert (done.exit_code, "No such file" in done.stderr) == (2, True)
    done = call("--out", tmp_path, "--pairs", file, "--hidden", 15, "--heads", 2)
    assert (done.exit_code, "not a multiple" in done.stderr) == (2, True)

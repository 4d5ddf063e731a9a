"""The benchmark of encoder-decoders, run on a pair of untrained models."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks import seq2seq
from outrider.train.export import export
from outrider.train.pairs import encode_pairs
from outrider.train.seq2seq import T5Shape, build_t5
from outrider.train.tokenizer import train_pair_tokenizer
from recipes.seq2seq_pair import SOURCE_WIDTH, TEXT_WIDTH

PAIRS = [("def g(x=1)", "g(x)"), ("def f(self) -> int", "f(self)"), ("def h(a: str)", "h(a)")]


def test_a_report(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = train_pair_tokenizer([text for pair in PAIRS for text in pair] * 3, 300)
    shape = T5Shape(len(tokenizer), 16, 24, encoder_layers=1, decoder_layers=1, heads=2)
    for seed, role in enumerate(("target", "draft")):
        export(build_t5(shape, seed), tokenizer, tmp_path / role / "model", "a card")
    (tmp_path / "pairs").mkdir()
    rows = encode_pairs(PAIRS, tokenizer, SOURCE_WIDTH, TEXT_WIDTH)
    np.save(tmp_path / "pairs" / "val.npy", rows)
    monkeypatch.setattr(seq2seq, "BUDGETS", (0.3,))
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)
    options = ["--repeats", "1", "--seeds", "1", "--timed", "1", "--note", "Untrained."]
    arguments = ["seq2seq", "--pair", str(tmp_path), "--out", str(tmp_path / "out"), *options]
    monkeypatch.setattr(sys, "argv", arguments)
    seq2seq.main()
    report = json.loads((tmp_path / "out" / "seq2seq.json").read_text())
    assert report["about"]["pairs"] == len(PAIRS)
    labels = [(row["label"], row["temperature"]) for row in report["rows"]]
    assert labels[0] == ("plain", 0.0)
    assert ("mentored, D=0.3", 1.0) in labels
    assert len(labels) == 7
    greedy = [row["exact_match"] for row in report["rows"] if row["temperature"] == 0]
    assert greedy == [greedy[0]] * 3
    page = (tmp_path / "out" / "seq2seq.md").read_text()
    assert "Untrained." in page
    assert page.count("\n| ") == len(labels) + 1

"""The held-out pairs of the encoder-decoder's recipe are prompts of the benchmark."""

from pathlib import Path

import numpy as np

from outrider.lab.data import read_data
from outrider.train.pairs import encode_pairs
from outrider.train.tokenizer import train_pair_tokenizer
from recipes.seq2seq_pair import SOURCE_WIDTH, TEXT_WIDTH, write_held_out

PAIRS = [("def g(x=1)", "g(x)"), ("def f(self) -> int", "f(self)"), ("def h(a: str)", "h(a)")]


def test_held_out_pairs_are_prompts_with_references(tmp_path: Path) -> None:
    tokenizer = train_pair_tokenizer([text for pair in PAIRS for text in pair] * 3, 300)
    np.save(tmp_path / "val.npy", encode_pairs(PAIRS, tokenizer, SOURCE_WIDTH, TEXT_WIDTH))
    write_held_out(tmp_path, tokenizer)
    data = read_data(str(tmp_path / "held_out.jsonl"))
    assert [(each.prompt, each.reference) for each in data] == PAIRS

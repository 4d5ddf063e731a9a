"""Batches depend only on seed and step, and visit every window."""

import numpy as np
import pytest
import torch

from outrider.train.corpus import Document, Source
from outrider.train.data import Batches, open_tokens, validation_rows, write_tokens
from outrider.train.tokenizer import train_tokenizer

TOKENS = np.arange(1000, dtype=np.uint16)


def test_a_batch_is_a_pure_function_of_seed_and_step():
    forwards = Batches(TOKENS, batch_size=4, length=16, seed=3)
    wanted = [forwards(step) for step in range(40)]  # more than two passes over the data
    backwards = Batches(TOKENS, batch_size=4, length=16, seed=3)
    for step in reversed(range(40)):
        assert torch.equal(backwards(step), wanted[step])
    assert not torch.equal(Batches(TOKENS, 4, 16, seed=4)(0), wanted[0])


def test_rows_are_windows_with_their_last_label():
    tokens_BT = Batches(TOKENS, batch_size=4, length=16, seed=0)(0)
    assert tokens_BT.shape == (4, 17)
    assert (tokens_BT.diff(dim=1) == 1).all()


def test_an_epoch_visits_every_window_once():
    batches = Batches(TOKENS, batch_size=1, length=16, seed=0)
    num_windows = 999 // 16 - 1
    starts = [int(batches(step)[0, 0]) for step in range(num_windows)]
    assert sorted(starts) == [16 * i for i in range(num_windows)]


def test_too_few_tokens_raise_an_error():
    with pytest.raises(ValueError, match="too few for sequences of 600"):
        Batches(TOKENS, 1, 600, seed=0)
    with pytest.raises(ValueError, match="too few for sequences of 2000"):
        validation_rows(TOKENS, 2000, 4)


def test_corpus_on_disk_and_its_manifest(tmp_path):
    documents = (Document("a.py", "x = 1\n", False), Document("b.py", "y = 2\n", True))
    tokenizer = train_tokenizer(["x = 1\ny = 2\n"], 260)
    manifest = write_tokens([Source("s", "1.0", "MIT", documents)], tokenizer, tmp_path)
    for split, text in (("train", "x = 1\n"), ("val", "y = 2\n")):
        tokens = open_tokens(tmp_path / f"{split}.bin")
        assert tokens[0] == tokenizer.eos_token_id
        assert tokenizer.decode(tokens[1:].tolist()) == text
        assert manifest["splits"][split] == {"files": 1, "bytes": 6, "tokens": len(tokens)}
    assert manifest["sources"][0]["licence"] == "MIT"

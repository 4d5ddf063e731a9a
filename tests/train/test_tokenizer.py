"""The tokenizer decodes every text exactly, also after saving and loading by AutoTokenizer."""

import pytest
from transformers import AutoTokenizer

from outrider.train.tokenizer import END_OF_TEXT, train_tokenizer

TEXTS = [
    "def f(x):\n    if x:\n        return x\n\n\nclass A:\n    pass\n",
    "  leading, trailing  \t \r\n\r\n  ",
    "héllo wörld 漢字 🎉 \u00a0 e\u0301",
    " .  , ! ' s n't",
    "",
    "\n",
]


@pytest.fixture(scope="module")
def tokenizer():
    code = ["def g(y):\n    while y:\n        y = y - 1\n        if y:\n            yield y\n"] * 20
    return train_tokenizer(code, vocab_size=300)


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip_is_exact(tokenizer, text, tmp_path):
    tokenizer.save_pretrained(tmp_path)
    for loaded in (tokenizer, AutoTokenizer.from_pretrained(tmp_path)):
        assert loaded.decode(loaded(text)["input_ids"]) == text


def test_indentation_is_one_token(tokenizer):
    assert tokenizer.tokenize("\n        y") == ["Ċ", "Ġ" * 8, "y"]


def test_the_size_and_the_special_token(tokenizer, tmp_path):
    assert len(tokenizer) <= 300
    tokenizer.save_pretrained(tmp_path)
    loaded = AutoTokenizer.from_pretrained(tmp_path)
    assert (loaded.eos_token, loaded.eos_token_id) == (END_OF_TEXT, 0)


def test_a_vocabulary_below_256_bytes_raises_an_error():
    with pytest.raises(ValueError, match="at least 257"):
        train_tokenizer(["x"], vocab_size=100)

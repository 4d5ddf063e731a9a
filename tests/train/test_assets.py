"""The embedded pair: sizes, shapes, the shared vocabulary, exact decoding, model cards."""

import json

import pytest
from safetensors import safe_open
from transformers import AutoTokenizer

from outrider.assets import draft_path, target_path

TEXT = "class Ünïcode:\n    def f(self, x):\n\n        return '漢字 🎉'  # \t done\r\n"


def config(folder):
    return json.loads((folder / "config.json").read_text())


def num_parameters(folder):
    with safe_open(folder / "model.safetensors", "pt") as tensors:
        sizes = [tensors.get_tensor(name) for name in tensors.keys()]  # noqa: SIM118
        assert {str(tensor.dtype) for tensor in sizes} == {"torch.bfloat16"}
        return sum(tensor.numel() for tensor in sizes)


def test_sizes():
    assert 12e6 <= num_parameters(target_path()) <= 18e6
    assert num_parameters(draft_path()) <= 2.5e6
    assert 12 <= config(target_path())["num_hidden_layers"] <= 20
    assert config(draft_path())["num_hidden_layers"] <= 2
    files = [f for folder in (target_path(), draft_path()) for f in folder.iterdir()]
    assert sum(file.stat().st_size for file in files) <= 40e6


def test_target_and_draft_share_their_vocabulary():
    target, draft = (AutoTokenizer.from_pretrained(path()) for path in (target_path, draft_path))
    assert target.get_vocab() == draft.get_vocab()
    assert target.eos_token_id == draft.eos_token_id == config(target_path())["eos_token_id"]
    assert 4000 <= len(target) == config(target_path())["vocab_size"] <= 8192
    assert len(draft) == config(draft_path())["vocab_size"]


def test_decoding_is_exact():
    tokenizer = AutoTokenizer.from_pretrained(target_path())
    assert tokenizer.decode(tokenizer(TEXT)["input_ids"]) == TEXT


@pytest.mark.parametrize("folder", [target_path, draft_path])
def test_model_card_states_the_facts(folder):
    card = (folder() / "README.md").read_text()
    for fact in ("bits per byte", "temperature", "Cost ratio", "licence", "python-stdlib"):
        assert fact in card

"""The command line with an encoder-decoder: the prompt is the source."""

import json
from pathlib import Path

import pytest
from tiny_models import byte_tokenizer
from tiny_seq2seq import tiny_seq2seq_module
from typer.testing import CliRunner

from outrider.cli import app


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    tokenizer = byte_tokenizer()
    module = tiny_seq2seq_module("t5", 2, vocab_size=len(tokenizer), eos_token_id=0)
    module.lm_head.weight = module.shared.weight
    path: Path = tmp_path_factory.mktemp("t5")
    module.save_pretrained(path)
    tokenizer.save_pretrained(path)
    return str(path)


def test_generate_compares_with_plain(folder: str) -> None:
    arguments = ["generate", "def f(x):", "--target", folder, "--draft", folder, "--compare"]
    arguments += ["--temperature", "0", "--max-new-tokens", "9", "--dtype", "float32"]
    done = CliRunner().invoke(app, [*arguments, "--json", "--ignore-eos"])
    assert done.exit_code == 0, done.stderr
    document = json.loads(done.stdout)
    assert len(document["token_ids"]) == 9
    traced = CliRunner().invoke(app, [*arguments, "--trace", "--ignore-eos"])
    assert traced.exit_code == 0, traced.stderr


@pytest.mark.parametrize("command", ["certify", "frontier", "tree-plan"])
def test_commands_for_decoder_only_models_say_so(command: str, folder: str, tmp_path: Path) -> None:
    arguments = [command, "--target", folder, "--draft", folder, "--dtype", "float32"]
    if command != "certify":
        arguments += ["--output" if command == "tree-plan" else "--out", str(tmp_path / "out")]
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("def f(x):\n")
    if command != "certify":
        arguments += ["-f", str(prompts)]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code != 0
    assert "encoder-decoder" in done.stderr, done.stderr
    assert len(done.stderr.strip().splitlines()) == 1

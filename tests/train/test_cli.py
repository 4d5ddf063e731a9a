"""`outrider train`: a whole tiny run, its resumption, and one-line errors with exit code 2."""

import pytest
import typer
from transformers import AutoModelForCausalLM, AutoTokenizer
from typer.testing import CliRunner

from outrider.cli.train import train

APP = typer.Typer()
APP.command("train")(train)
TINY = (
    "--vocab-size 300 --layers 1 --hidden 16 --ffn 16 --heads 2 --kv-heads 1 --context 32 "
    "--batch 2 --length 16 --steps 4 --no-tensorboard"
).split()


def invoke(*arguments):
    return CliRunner().invoke(APP, [str(argument) for argument in arguments])


@pytest.fixture
def text(tmp_path):
    path = tmp_path / "text.txt"
    path.write_text("".join(f"value_{i} = compute({i}, other={i * i})\n" for i in range(400)))
    return path


def test_target_then_draft_then_resume(tmp_path, text):
    result = invoke("--out", tmp_path / "target", "--text", text, *TINY)
    assert result.exit_code == 0, result.output
    assert "bits per byte" in result.output
    target = tmp_path / "target" / "model"
    assert AutoTokenizer.from_pretrained(target).eos_token_id == 0
    assert AutoModelForCausalLM.from_pretrained(target).config.num_hidden_layers == 1
    draft = ("--out", tmp_path / "draft", "--text", text, *TINY, "--teacher", target)
    assert invoke(*draft).exit_code == 0
    longer = invoke(*draft, "--steps", 6)
    assert longer.exit_code == 0
    assert "resuming after step 4" in longer.output
    other = invoke(*draft, "--seed", 7)
    assert other.exit_code == 2
    assert "seed 0, not 7" in other.output


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ([], "nothing to train on"),
        (["--package", "no-such-package"], "pip install no-such-package"),
        (["--package", "python-stdlib", "--steps", "0"], "--steps is 0"),
        (["--package", "python-stdlib", "--length", "5000"], "--length 5000"),
        (["--package", "python-stdlib", "--teacher", "nowhere"], "no such folder: nowhere"),
        (["--text", "nowhere.txt"], "no such file or folder: nowhere.txt"),
        (["--text", "TEXT", "--heads", "3"], "hidden size 16 is not a multiple of 3"),
        (["--text", "TEXT", "--lr", "-1"], "learning rate is -1.0"),
        (["--text", "TEXT", "--decay", "9"], "do not fit into 4 steps"),
        (["--text", "TEXT", "--vocab-size", "10"], "vocab_size is 10"),
        (["--text", "TEXT", "--dtype", "int3"], "int3"),
    ],
)
def test_bad_input_is_one_line_and_exit_code_2(tmp_path, text, arguments, said):
    arguments = [str(text) if a == "TEXT" else a for a in arguments]
    result = invoke("--out", tmp_path / "run", *TINY, *arguments)
    assert result.exit_code == 2
    assert said in result.output
    assert "Traceback" not in result.output

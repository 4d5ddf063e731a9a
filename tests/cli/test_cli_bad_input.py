"""Bad input: one line on stderr, exit code 2, nothing on stdout, no stack trace."""

import errno
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from typer.testing import Result

Run = Callable[..., Result]


def assert_refused(result: Result, *parts: str) -> None:
    lines = result.stderr.splitlines()
    assert result.exit_code == 2, result.output
    assert len(lines) == 1, result.stderr
    assert lines[0].startswith("error: ")
    for part in parts:
        assert part in lines[0]
    assert result.stdout == ""


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        ([""], ["the prompt is empty"]),
        ([], ["no prompt", "outrider generate"]),
        (["x", "-f", "y"], ["choose one"]),
        (["-f", "nowhere.txt"], ["'nowhere.txt'", "No such file"]),
        (["x", "--num-speculative-tokens", "0"], ["--num-speculative-tokens 0", "1 to 64"]),
        (["x", "--num-speculative-tokens", "65"], ["--num-speculative-tokens 65", "1 to 64"]),
        (["x", "--temperature", "-1"], ["--temperature -1.0", "0 (greedy) or at least"]),
        (["x", "--temperature", "warm"], ["--temperature", "number"]),
        (["x", "--temperature", "nan"], ["--temperature nan"]),
        (["x", "--top-p", "0"], ["--top-p 0.0", "(0, 1]"]),
        (["x", "--top-p", "1.5"], ["--top-p 1.5", "(0, 1]"]),
        (["x", "--top-k", "-1"], ["--top-k -1"]),
        (["x", "--max-new-tokens", "0"], ["--max-new-tokens 0"]),
        (["x", "--draft-confidence", "2"], ["--draft-confidence 2.0", "[0, 1]"]),
        (["x", "--draft-length", "long"], ["--draft-length long", "survival:THETA"]),
        (["x", "--logit-bias", "5"], ["ID=BIAS"]),
        (["x", "--logit-bias", "99999=1"], ["99999", "0 to "]),
        (["x", "--logprobs", "2"], ["--logprobs needs --json"]),
        (["x", "--json", "--trace"], ["choose one"]),
        (["x", "--stop", ""], ["--stop ''"]),
        (["x", "--method", "specultive"], ["unknown method", "'speculative'"]),
        (["x", "--method", "greedy"], ["temperature 0 only"]),
        (["x", "--method", "plain", "--compare"], ["another --method"]),
        (["x", "--dtype", "int8"], ["--dtype int8", "bfloat16"]),
        (["x", "--device", "abacus"], ["--device abacus", "cuda"]),
        (["x", "--temprature", "1"], ["--temprature", "--temperature", "generate --help"]),
        (["def f(x): return x + 1\n" * 200], ["the context 256", "shorten"]),
    ],
)
def test_bad_option(generate: Run, arguments: list[str], parts: list[str]) -> None:
    assert_refused(generate(*arguments), *parts)


def test_unknown_command_names_the_nearest(run: Run) -> None:
    assert_refused(run("genrate"), "'genrate'", "'generate'")


@pytest.mark.parametrize("target", ["nobody/nothing", "~/nothing"])
def test_draft_missing(run: Run, target: str) -> None:
    """The error appears before anything is loaded, and names methods that need no draft."""
    remedies = ("--draft", "--method plain", "--method prompt-lookup", "--method suffix")
    assert_refused(run("generate", "x", "--target", target), *remedies)


@pytest.mark.parametrize("command", ["tree-plan", "demo", "frontier"])
def test_draft_missing_where_there_is_no_other_method(run: Run, command: str) -> None:
    result = run(command, "--target", "nobody/nothing")
    assert_refused(result, f"outrider {command} needs a draft model", "--draft MODEL")
    assert "--method" not in result.stderr


def test_custom_code(generate: Run, broken: Path) -> None:
    config = json.loads((broken / "config.json").read_text())
    config |= {"model_type": "their_own", "auto_map": {"AutoConfig": "theirs.TheirConfig"}}
    (broken / "config.json").write_text(json.dumps(config))
    assert_refused(generate("x", "--target", broken), "with --trust-remote-code")


def test_temperature_of_bild(generate: Run) -> None:
    result = generate("x", "--method", "bild")
    assert_refused(result, "temperature 0 only", "--temperature 0", "mode='mjsd'")


def test_tilde_is_the_home_folder(
    generate: Run, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(pair[0].parent))
    monkeypatch.setenv("USERPROFILE", str(pair[0].parent))
    assert_refused(generate("--file=~/nowhere.txt"), str(pair[0].parent / "nowhere.txt"))
    done = generate("x", "--target=~/target", "--draft=~/draft")
    assert done.exit_code == 0, done.stderr


def test_unknown_path(generate: Run) -> None:
    assert_refused(generate("x", "--target", "./nowhere"), "'./nowhere'", "no such folder")


def test_missing_tokenizer(generate: Run, broken: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (broken / name).unlink()
    assert_refused(generate("x", "--target", broken), "tokenizer", str(broken))


def test_pickled_weights(generate: Run, broken: Path) -> None:
    weights = load_file(broken / "model.safetensors")
    torch.save(weights, broken / "pytorch_model.bin")
    (broken / "model.safetensors").unlink()
    assert_refused(generate("x", "--target", broken), "pickle", "safetensors")


def test_different_vocabularies(generate: Run, stranger: Path) -> None:
    assert_refused(generate("x", "--draft", stranger), "different vocabularies", "draft")


def test_damaged_weights(generate: Run, broken: Path) -> None:
    (broken / "model.safetensors").write_bytes(b"not weights")
    assert_refused(generate("x", "--target", broken), "cannot load target")


@pytest.mark.parametrize("role", ["target", "draft"])
def test_nan_logits_name_model_and_position(generate: Run, broken: Path, role: str) -> None:
    weights = load_file(broken / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * float("nan")
    save_file(weights, broken / "model.safetensors", metadata={"format": "pt"})
    result = generate("x", f"--{role}", broken)
    assert_refused(result, f"{role} {broken}", "NaN", "position", "check its files")


def test_a_prompt_file_that_is_not_text(generate: Run, tmp_path: Path) -> None:
    file = tmp_path / "prompt.bin"
    file.write_bytes(b"abc\xff\xfe")
    assert_refused(generate("-f", file), "not UTF-8", "byte 3")


def test_embedded_pair_missing(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    from outrider import assets

    monkeypatch.setattr(assets, "files", lambda name: Path("nowhere"))
    assert_refused(run("generate", "x"), "embedded target", "missing")


@pytest.mark.parametrize(("file", "what"), [(None, "the output"), ("answers.txt", "'answers.txt'")])
def test_a_full_disk_is_no_bug(
    generate: Run, monkeypatch: pytest.MonkeyPatch, file: str | None, what: str
) -> None:
    def fall(*arguments: object, **keywords: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", file)

    monkeypatch.setattr("outrider.cli.generate.follow", fall)
    assert_refused(generate("x"), f"error: cannot write {what}: No space left on device")


def test_unexpected_errors_are_one_line_with_code_1(
    generate: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fall(*arguments: object, **keywords: object) -> None:
        raise ZeroDivisionError("one\ntwo")

    monkeypatch.setattr("outrider.cli.generate.follow", fall)
    result = generate("x")
    assert result.exit_code == 1
    assert result.stderr == (
        "error: unexpected ZeroDivisionError: one (OUTRIDER_DEBUG=1 shows where; please report "
        "it)\n"
    )
    shown = generate("x", env={"OUTRIDER_DEBUG": "1"})
    assert "Traceback" in shown.stderr
    assert shown.exit_code == 1

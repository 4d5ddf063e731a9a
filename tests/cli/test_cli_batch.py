"""``outrider batch``: a file of prompts, its errors, and what is refused before models load."""

import json
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

Run = Callable[..., Result]


def test_lines_are_answered_and_malformed_ones_reported(
    run: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    prompts.write_text('{"prompt": "def f(x):", "id": 5}\n{"prompt"\n{"prompt": "return"}\n')
    target, draft = pair
    models = ("--target", str(target), "--draft", str(draft), "--dtype", "float32")
    result = run("batch", str(prompts), "-o", str(out), *models, "-n", "4", "--device", "cpu")
    assert result.exit_code == 1
    assert "line 2: no JSON" in result.stderr
    assert "3 lines, 1 with an error" in result.stderr
    first, second, third = (json.loads(line) for line in out.read_text().splitlines())
    assert (first["id"], first["num_tokens"]) == (5, 4)
    assert second["error"]["line"] == 2
    assert third["prompt"] == "return"
    again = run("batch", str(prompts), "-o", str(out), *models)
    assert again.exit_code == 2
    assert "--overwrite" in again.stderr


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--system", "Be brief."), "add --chat"),
        (("--workers", "0"), "--workers"),
        (("--logit-bias", "x"), "--logit-bias"),
        (("--option", "budget"), "NAME=VALUE"),
    ],
)
def test_bad_options(run: Run, tmp_path: Path, arguments: tuple[str, ...], message: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    result = run("batch", str(prompts), "-o", str(tmp_path / "out.jsonl"), *arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert not list(tmp_path.glob("out*"))


def test_prompts_that_are_missing(run: Run, tmp_path: Path) -> None:
    result = run("batch", str(tmp_path / "none"), "-o", str(tmp_path / "out.jsonl"))
    assert result.exit_code == 2
    assert "cannot read the prompts" in result.stderr


@pytest.mark.parametrize("command", ["batch", "serve"])
def test_ray_that_is_not_installed(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str
) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"prompt": "a"}\n')
    batch = ("batch", str(prompts), "-o", str(tmp_path / "out.jsonl"), "--ray", "local")
    result = run(*(batch if command == "batch" else ("serve", "--replicas", "2")))
    assert result.exit_code == 2
    assert "pip install 'outrider[cluster]'" in result.stderr
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--port", "0"), "name the port"),
        (("--max-queue", "0"), "--max-queue 0 with --replicas"),
        (("--otlp-traces-endpoint", "http://localhost:4318/v1/traces"), "--otlp-traces-endpoint"),
    ],
)
def test_what_replicas_do_not_have(run: Run, arguments: tuple[str, ...], message: str) -> None:
    result = run("serve", "--replicas", "2", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr

"""``outrider profile`` on a tiny pair: its tables, its JSON, its files, its errors."""

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
from typer.testing import Result

from outrider.lab.profile.beta import pass_times

Run = Callable[..., Result]


@pytest.fixture
def profile(pair: tuple[Path, Path], run: Run, monkeypatch: pytest.MonkeyPatch) -> Run:
    """The command with the tiny pair, little memory, and few passes and rounds."""
    monkeypatch.setattr("outrider.lab.profile.run.LARGE", 2**16)
    monkeypatch.setattr("outrider.lab.profile.run.last_level_cache", lambda device: 2**17)
    monkeypatch.setattr("outrider.lab.profile.model.pass_times", partial(pass_times, repeats=1))

    def call(*arguments: object) -> Result:
        target, draft = pair
        models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")
        return run("profile", *models, "--rounds", 3, "--repeats", 1, *arguments)

    return call


def test_tables_and_files(profile: Run, tmp_path: Path) -> None:
    """All parts appear in 80 columns, and both files have the right format."""
    pytest.importorskip("matplotlib")
    trace, plot = tmp_path / "trace.json", tmp_path / "beta.svg"
    done = profile("def f1(x):", "--trace", trace, "--plot", plot)
    assert done.exit_code == 0, done.output
    for text in (
        *("draft", "target", "verify", "cache", "Python", "total", "drawing"),
        *("device-to-host sync", "text and stops"),
        *("Outside the models' passes:", "Memory:", "reached", "β", "Speed-up over plain"),
        *("E from α, i.i.d.", "E as measured"),
    ):
        assert text in done.stdout
    assert "…" not in done.stdout
    assert max(map(len, done.stdout.splitlines())) <= 80
    events = json.loads(trace.read_text(encoding="utf-8"))["traceEvents"]
    assert sum(event["name"] == "round" for event in events) == 4
    assert plot.read_text(encoding="utf-8").lstrip().startswith("<?xml")
    assert f"wrote {trace}" in done.stderr.replace("\n", "")


def test_json(profile: Run) -> None:
    done = profile("--json", "--method", "suffix", "--temperature", 0)
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["about"]["draft"] is None
    assert found["run"]["method"] == "suffix"
    assert found["run"]["rounds"] == 3
    assert sum(row["seconds"] for row in found["phases"]["phases"]) == pytest.approx(
        found["phases"]["seconds"]
    )
    assert set(found["models"]) == {"target"}
    assert found["memory"]["last_level_cache"] == 2**17


def test_plain_has_nothing_to_compare(profile: Run) -> None:
    done = profile("def f1(x):", "--method", "plain")
    assert done.exit_code == 0, done.output
    assert "tokens per second." in done.stdout
    assert "Formula" not in done.stdout


@pytest.mark.parametrize(
    ("arguments", "parts"),
    [
        (["--trace", "missing/t.json"], ["--trace", "there is no folder missing"]),
        (["--trace", "."], ["is a folder"]),
        (["--plot", "beta.pdf"], ["--plot beta.pdf", ".svg or .png"]),
        (["--plot", "b.svg", "--trace", "b.svg"], ["a file of its own"]),
        (["x", "-f", "y"], ["choose one"]),
        ([""], ["the prompt is empty"]),
        (["--rounds", "0"], ["--rounds", "greater than or equal to 1"]),
        (["--option", "a"], ["NAME=VALUE"]),
        (["--method", "specultive"], ["unknown method"]),
        (["--temperature", "-1"], ["--temperature -1.0"]),
        (["--method", "greedy"], ["temperature 0 only"]),
        (["def f(x): return x + 1\n" * 200], ["the context 256", "shorten"]),
    ],
)
def test_bad_input(
    profile: Run,
    arguments: list[str],
    parts: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    done = profile(*arguments)
    assert done.exit_code == 2, done.output
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ")
    for part in parts:
        assert part in line
    assert not list(tmp_path.iterdir())


def test_a_file_that_cannot_be_written(
    profile: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The error appears before any work, and the file is not changed."""
    file = tmp_path / "trace.json"
    file.write_text("precious", encoding="utf-8")
    monkeypatch.setattr("outrider.cli.profile.os.access", lambda path, mode: mode != os.W_OK)
    done = profile("--trace", file)
    assert done.exit_code == 2
    assert "no permission" in done.stderr
    assert file.read_text(encoding="utf-8") == "precious"

"""Messages while a command starts: its stages on a terminal, otherwise nothing."""

import os
import pty
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from outrider.cli import engines, start
from outrider.cli.progress import Progress

Run = Callable[..., Result]


@pytest.fixture
def shown(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The stages that the command shows."""
    stages: list[str] = []

    class Listening(Progress):
        def show(self, stage: str, share: float | None = None) -> None:
            stages.append(stage)

    for module in (engines, start):
        monkeypatch.setattr(module, "Progress", Listening)
    return stages


def test_each_model_is_named_while_it_loads(
    generate: Run, pair: tuple[Path, Path], shown: list[str]
) -> None:
    assert generate("x", "-n", 1).exit_code == 0
    target, draft = pair
    assert shown == [
        "importing torch and transformers",
        f"loading target {target}",
        f"loading draft {draft}",
    ]


@pytest.mark.parametrize("command", ["demo", "certify"])
def test_the_embedded_pair_is_named_too(
    run: Run, shown: list[str], command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("outrider.engine.building.load_model", stop)
    done = run(command)
    assert (done.exit_code, done.stderr) == (130, "interrupted\n")
    assert shown == ["importing torch and transformers", "loading target embedded"]


def test_nothing_is_shown_without_a_terminal(capfd: pytest.CaptureFixture[str]) -> None:
    with Progress() as progress:
        progress.show("loading")
    assert capfd.readouterr() == ("", "")


@pytest.mark.skipif(sys.platform == "win32", reason="POSIX terminals")
def test_a_terminal_shows_the_stage_and_is_left_clean() -> None:
    program = (
        "from outrider.cli.progress import Progress\n"
        "with Progress() as progress: progress.show('loading target big')\n"
        "print('end')"
    )
    ours, theirs = pty.openpty()
    environment = {**os.environ, "TERM": "xterm", "COLUMNS": "80"}
    done = subprocess.run(
        [sys.executable, "-c", program], stderr=theirs, stdout=theirs, env=environment
    )
    os.close(theirs)
    text = os.read(ours, 1 << 16).decode()
    os.close(ours)
    assert done.returncode == 0
    assert "loading target big" in text
    assert text.endswith("\x1b[2Kend\r\n")  # the line is erased


def test_training_prints_nothing_of_libraries(tmp_path: Path) -> None:
    """Every line of a whole tiny run is Outrider's own."""
    text = tmp_path / "text.txt"
    text.write_text("".join(f"value_{i} = compute({i}, other={i * i})\n" for i in range(400)))
    shape = "--vocab-size 300 --layers 1 --hidden 16 --ffn 16 --heads 2 --kv-heads 1 --context 32"
    size = "--batch 2 --length 16 --steps 2 --no-tensorboard"
    arguments = [*shape.split(), *size.split(), "--text", str(text), "--out", str(tmp_path / "run")]
    program = "from outrider.cli import main; main()"
    done = subprocess.run(
        [sys.executable, "-c", program, "train", *arguments], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    for word in ("Failed to load", "W1", "Warning", "torchao", "_pytree"):
        assert word not in done.stderr
    assert done.stderr.splitlines()[0].startswith(("run ", "held-out", "too little"))

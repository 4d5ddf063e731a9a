"""``outrider compile``: what it says, and what an interruption keeps."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from interpreted_graphs import untraced
from tiny_models import engine_of, tiny
from torch import nn
from typer.testing import Result

from outrider import Engine
from outrider.cli.progress import Progress
from outrider.runtime import HFModel
from outrider.runtime.executors.compile_cache import Program
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.fused_verification import CompiledVerifier

Run = Callable[..., Result]


def with_engine(monkeypatch: pytest.MonkeyPatch, engine: Engine) -> dict[str, Any]:
    """Opens this engine, whatever is asked for; the settings that are."""
    found: dict[str, Any] = {}

    def load(*_: object, **settings: Any) -> Engine:
        found.update(settings)
        return engine

    monkeypatch.setattr("outrider.engine.load", load)
    return found


def compiled(model: HFModel, *, works: bool = True) -> HFModel:
    model.compiled = CompiledExecutor(model.module, model.spec, "m", lambda each, _: untraced(each))
    model.compiled.failed = not works
    return model


def plain(model: HFModel) -> Engine:
    """An engine whose rule has a program."""
    engine = engine_of(model, None, "plain", 3)
    engine.verification = CompiledVerifier(lambda module, *_: untraced(module))
    return engine


def test_says_how_many_programs_there_are(
    run: Run, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    found = with_engine(monkeypatch, plain(compiled(tiny())))
    done = run("compile", "--target", pair[0], "--method", "plain")
    assert (done.exit_code, done.stderr) == (0, "")
    assert done.stdout.startswith("2 programs in ")
    assert found["compile"] == "auto"
    assert found["background"] is False


def test_fails_where_a_model_does_not_compile(
    run: Run, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    with_engine(monkeypatch, plain(compiled(tiny(), works=False)))
    done = run("compile", "--target", pair[0], "--method", "plain")
    assert done.exit_code == 1
    assert "runs eagerly" in done.stderr


def test_fails_where_a_program_computes_something_else(
    run: Run, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def wrong(module: nn.Module, _: object) -> Program:
        program = untraced(module)
        return lambda inputs: [2 * each for each in program(inputs)]

    model = tiny()
    model.compiled = CompiledExecutor(model.module, model.spec, "m", wrong)
    with_engine(monkeypatch, plain(model))
    done = run("compile", "--target", pair[0], "--method", "plain")
    assert done.exit_code == 1
    assert done.stderr.endswith(f"not compiled: chain of {model.name}; runs eagerly\n")


def test_fails_where_a_rule_does_not_compile(
    run: Run, pair: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def failing(*_: object) -> Program:
        raise RuntimeError("no compiler")

    engine = engine_of(compiled(tiny()), compiled(tiny(seed=1)), "speculative", 3)
    engine.verification = CompiledVerifier(failing)
    with_engine(monkeypatch, engine)
    done = run("compile", "--target", pair[0], "--draft", pair[1])
    assert done.exit_code == 1
    assert "not compiled: Greedy, Rejection; runs eagerly" in done.stderr


def test_an_interruption_says_where_the_finished_programs_are(
    run: Run, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(*_: object, **__: object) -> Engine:
        raise KeyboardInterrupt

    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr("outrider.engine.load", interrupt)
    done = run("compile", "--target", pair[0], "--method", "plain")
    assert (done.exit_code, done.stdout) == (130, "")
    assert done.stderr == f"interrupted: {tmp_path} keeps the programs that are compiled\n"


def test_the_progress_shows_the_time_left() -> None:
    kinds = [type(each).__name__ for each in Progress(time_left=True)._bar.columns]
    assert "TimeRemainingColumn" in kinds
    assert "TimeRemainingColumn" not in [type(c).__name__ for c in Progress()._bar.columns]

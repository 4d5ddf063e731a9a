"""The process that compiles in the background."""

import json
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_models import byte_tokenizer, tiny_module

from outrider.cli import start
from outrider.cli.options.models import Models
from outrider.engine import Engine, building, compiler_process, loading, warming
from outrider.engine.background import compiler_at_hand
from outrider.engine.warming import Stage
from outrider.runtime import load_model
from outrider.runtime.executors.compile_cache import _MISSING, Missing


def test_compiles_what_no_other_process_compiles_and_awaits_the_rest(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[tuple[int, Missing]] = []

    def make(number: int) -> None:
        choice, left = _MISSING.get()
        if choice is Missing.COMPILE_UNLOCKED and number == 0:  # another process has its lock
            left.append(Path("program"))
            return
        made.append((number, choice))

    stages = [Stage(str(n), lambda n=n: make(n), False, n) for n in range(3)]  # type: ignore[misc]
    monkeypatch.setattr(building, "build", lambda **settings: settings)
    monkeypatch.setattr(warming, "programs_of", lambda engine: stages if engine else [])
    told: list[dict[str, int]] = []
    compiler_process.compile_programs({"target": "t"}, lambda **document: told.append(document))
    assert made == [
        (1, Missing.COMPILE_UNLOCKED),
        (2, Missing.COMPILE_UNLOCKED),
        (0, Missing.COMPILE),
    ]
    assert told == [{"compiled": 1}, {"compiled": 2}, {"compiled": 0}]


@pytest.mark.parametrize("layers", [False, True])
def test_layers_are_compiled_first_where_they_are_asked_for(
    layers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    nothing = lambda: None  # noqa: E731
    monkeypatch.setattr(building, "build", lambda **settings: settings)
    monkeypatch.setattr(warming, "programs_of", lambda _: [Stage("pass", nothing, False, 0)])
    monkeypatch.setattr(warming, "layers_of", lambda _: [Stage("layers", nothing, False, 1)])
    told: list[int] = []
    compiler_process.compile_programs({}, lambda compiled: told.append(compiled), layers=layers)
    assert told == ([1, 0] if layers else [0])


@pytest.mark.slow
def test_the_process_loads_the_models_and_ends(tmp_path: Path) -> None:
    """No program is compiled here, so it speaks of the kernels alone."""
    process = compiler_process.start(arguments(tmp_path))
    assert process.stdout is not None
    with process.stdout:
        assert json.loads(process.stdout.read()) == {"compiled": compiler_process.KERNELS}
    assert process.wait() == 0
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.slow
def test_the_process_says_what_is_wrong(tmp_path: Path) -> None:
    process = compiler_process.start(arguments(tmp_path) | {"target": str(tmp_path / "gone")})
    assert process.stdout is not None
    with process.stdout:
        assert b"nothing is compiled in the background" in process.stdout.read()
    assert process.wait() == 0
    assert process.stdin is not None
    process.stdin.close()


@pytest.mark.slow
def test_the_process_ends_where_it_is_told_nothing() -> None:
    process = compiler_process.begin()
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdin.close()
    with process.stdout:
        assert json.loads(process.stdout.read()) == {"compiled": compiler_process.KERNELS}
    assert process.wait() == 0


def test_whoever_starts_the_process_waits_for_no_import() -> None:
    code = (
        "import sys, outrider.engine.compiler_process\n"
        "assert not {'torch', 'transformers', 'numpy'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_the_kernels_are_compiled_before_transformers_is_imported() -> None:
    code = (
        "import sys, outrider.runtime.kernels.build\n"
        "assert 'torch' in sys.modules and 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.fixture
def ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """A machine without kernels; the processes that are started on it, which do nothing."""
    started: list[Any] = []

    def popen(*_: object, **__: object) -> Any:
        pipes = dict.fromkeys(("stdin", "stdout"), subprocess.PIPE)
        started.append(real(["sleep", "1000"], **pipes, start_new_session=True))
        return started[-1]

    real = subprocess.Popen
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    monkeypatch.setattr(compiler_process, "num_processors", lambda: 2)
    monkeypatch.setattr(compiler_process, "available_bytes", lambda: compiler_process.OVERHEAD)
    monkeypatch.setattr("subprocess.Popen", popen)
    yield started
    monkeypatch.undo()
    compiler_process.kill_ahead()
    for process in started:
        compiler_process.kill(process)


def test_the_engine_gets_the_process_that_was_started_ahead(ahead: list[Any]) -> None:
    compiler_process.begin_ahead()
    assert compiler_process.begin() is ahead[0]
    assert compiler_process.begin() is ahead[1]
    compiler_process.kill_ahead()
    assert ahead[0].poll() is None


def test_a_process_that_no_engine_gets_is_killed(ahead: list[Any]) -> None:
    compiler_process.begin_ahead()
    with compiler_at_hand(False):
        pass
    assert ahead[0].returncode == -signal.SIGKILL


@pytest.mark.parametrize("lacks", ["processors", "memory", "nothing"])
def test_no_process_is_started_ahead_without_need_or_room(
    lacks: str, ahead: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if lacks == "processors":
        monkeypatch.setattr(compiler_process, "num_processors", lambda: 1)
    elif lacks == "memory":
        monkeypatch.setattr(compiler_process, "available_bytes", lambda: 2**30)
    else:
        (tmp_path / "kernels").mkdir()
        (tmp_path / "kernels" / "some.so").touch()
    compiler_process.begin_ahead()
    assert ahead == []


def test_commands_start_it_where_they_compile(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[bool] = []
    monkeypatch.setattr(start, "begin_ahead", lambda: asked.append(True))
    start.start(compiles=False)
    assert not asked
    start.start(compiles=True)
    assert asked
    compiling = {"compile": "auto", "device": "cpu"}, {"compile": "max"}
    assert all(Models(**settings).compiles for settings in compiling)  # type: ignore[arg-type]
    others: tuple[dict[str, Any], ...] = {}, {"compile": "auto", "device": "cuda"}
    assert not any(Models(**settings).compiles for settings in others)


_OF_SESSION = "/proc/self/autogroup"


@pytest.mark.skipif(not Path(_OF_SESSION).exists(), reason="sessions have no priority here")
def test_the_priority_of_the_session_is_lowered() -> None:
    code = (
        "from outrider.engine.compiler_process import lower_priority\n"
        f"lower_priority(); print(open({_OF_SESSION!r}).read())"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True,
        text=True,
        check=True,
        start_new_session=True,
    )
    assert done.stdout.split()[1:] == ["nice", str(compiler_process.PRIORITY)]


def arguments(folder: Path) -> dict[str, Any]:
    """Those of ``load`` for a tiny model, plainly and eagerly."""
    tiny_module().save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return {
        **dict.fromkeys(
            "draft num_speculative_tokens options verifier max_memory prefix_cache "
            "quantize_draft quantize_target".split()
        ),
        **dict.fromkeys(("trust_remote_code", "exact"), False),
        **dict.fromkeys(("measure", "generation_config"), True),
        "target": str(folder),
        "method": "plain",
        "draft_confidence": 0.0,
        "draft_length": "fixed",
        "max_batch_size": 1,
        "kv_dtype": "auto",
        "dtype": "float32",
        "device": "cpu",
        "compile": "off",
        "make": Engine,
    }


@pytest.mark.parametrize(
    ("changes", "wanted"),
    [
        ({}, True),
        ({"compile": "off"}, False),
        ({"kernels_are_missing": False}, False),
        ({"has_room": False}, False),
        ({"in_memory": True}, False),
    ],
)
def test_a_process_is_at_hand_from_the_start_where_kernels_are_to_be_compiled(
    changes: dict[str, Any], wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is told what to compile."""
    asked: list[object] = []
    here: dict[str, Any] = {"compile": "auto", "kernels_are_missing": True, "has_room": True}
    here |= changes

    @contextmanager
    def at_hand(wanted: bool) -> Iterator[str]:
        asked.append(wanted)
        yield "begin"

    monkeypatch.setattr(loading, "compiler_at_hand", at_hand)
    monkeypatch.setattr(loading, "kernels_are_missing", lambda: here["kernels_are_missing"])
    monkeypatch.setattr(compiler_process, "has_room", lambda: here["has_room"])
    monkeypatch.setattr(loading, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(loading, "_load_programs", lambda *given: asked.append(given[-2]))
    told = arguments(tmp_path) | {"compile": here["compile"]}
    if "in_memory" in changes:
        told["target"] = load_model(tmp_path, dtype="float32")
    loading.load(**told)
    may_share = here["compile"] != "off" and "in_memory" not in changes
    assert asked == [wanted] + ["begin"] * may_share

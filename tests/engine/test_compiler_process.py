"""The process that compiles in the background."""

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from tiny_models import byte_tokenizer, tiny_module

from outrider.engine import Engine, compiler_process, loading, warming
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
    monkeypatch.setattr(loading, "build", lambda **settings: settings)
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
    monkeypatch.setattr(loading, "build", lambda **settings: settings)
    monkeypatch.setattr(warming, "programs_of", lambda _: [Stage("pass", nothing, False, 0)])
    monkeypatch.setattr(warming, "layers_of", lambda _: [Stage("layers", nothing, False, 1)])
    told: list[int] = []
    compiler_process.compile_programs({}, lambda compiled: told.append(compiled), layers=layers)
    assert told == ([1, 0] if layers else [0])


@pytest.mark.slow
def test_the_process_loads_the_models_and_ends(tmp_path: Path) -> None:
    """Nothing is compiled here, so it has nothing to say."""
    process = compiler_process.start(arguments(tmp_path))
    assert process.stdout is not None
    with process.stdout:
        assert process.stdout.read() == b""
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
def test_the_process_ends_without_a_word_where_it_is_told_nothing() -> None:
    process = compiler_process.begin()
    assert process.stdout is not None
    assert process.stdin is not None
    process.stdin.close()
    with process.stdout:
        assert process.stdout.read() == b""
    assert process.wait() == 0


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
        ({"num_processors": 1}, False),
        ({"has_room": False}, False),
        ({"in_memory": True}, False),
    ],
)
def test_a_process_is_at_hand_from_the_start_where_kernels_are_to_be_compiled(
    changes: dict[str, Any], wanted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And is told what to compile."""
    asked: list[object] = []
    here: dict[str, Any] = {"compile": "auto", "kernels_are_missing": True, "num_processors": 2}
    here |= {"has_room": True} | changes

    @contextmanager
    def at_hand(wanted: bool) -> Iterator[str]:
        asked.append(wanted)
        yield "begin"

    monkeypatch.setattr(loading, "compiler_at_hand", at_hand)
    for name in ("kernels_are_missing", "num_processors", "has_room"):
        monkeypatch.setattr(loading, name, lambda name=name: here[name])
    monkeypatch.setattr(loading, "prepare", lambda *_, **__: None)
    monkeypatch.setattr(loading, "_load_programs", lambda *given: asked.append(given[-1]))
    told = arguments(tmp_path) | {"compile": here["compile"]}
    if "in_memory" in changes:
        told["target"] = load_model(tmp_path, dtype="float32")
    loading.load(**told)
    may_share = here["compile"] != "off" and "in_memory" not in changes
    assert asked == [wanted] + ["begin"] * may_share

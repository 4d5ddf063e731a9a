"""Options of models are the same in every command that loads models."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import Result

from outrider.cli.group import expanded
from outrider.core.errors import InvalidParameterError

Run = Callable[..., Result]
TARGET = ("--compile", "max", "--quantize-target", "int4", "--kv-dtype", "int8")
PAIR = (*TARGET, "--quantize-draft", "int8", "--exact", "--trust-remote-code", "--draft", "d")
MEMORY = ("--max-memory", "1GB")


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The arguments that ``load`` gets; it then raises an error."""
    found: dict[str, Any] = {}

    def ask(target: str, draft: str | None, method: str, *_: object, **settings: Any) -> None:
        found.update(settings | {"target": target, "draft": draft, "method": method})
        raise InvalidParameterError("compile='max': asked for")

    monkeypatch.setattr("outrider.engine.load", ask)
    return found


@pytest.mark.parametrize(
    ("command", "options"),
    [
        (("demo",), (*PAIR, *MEMORY)),
        (("generate", "x"), (*PAIR, *MEMORY)),
        (("profile",), (*PAIR, *MEMORY)),
        (("certify",), PAIR),
        (("frontier", "--out", "out", "-f", "prompts"), PAIR),
        (("tree-plan",), PAIR),
        (("ngram", "build", "--from-samples", 9, "--out", "file"), (*TARGET, *MEMORY)),
    ],
    ids=lambda given: str(given[0]),
)
def test_options_reach_the_models(
    run: Run,
    asked: dict[str, Any],
    pair: tuple[Path, Path],
    command: tuple[str, ...],
    options: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if command[0] == "frontier":
        pytest.importorskip("matplotlib")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "prompts").write_text("def f\n")
    done = run(*command, "--target", pair[0], *options)
    assert (done.exit_code, done.stderr) == (2, "error: --compile max: asked for\n")
    wanted = {"compile": "max", "quantize_target": "int4", "kv_dtype": "int8"}
    if options[: len(PAIR)] == PAIR:
        wanted |= {"quantize_draft": "int8", "exact": True, "trust_remote_code": True, "draft": "d"}
    if options[-2:] == MEMORY:
        wanted |= {"max_memory": "1GB"}
    else:
        assert asked["max_memory"] is None
    assert {name: asked[name] for name in wanted} == wanted
    assert asked["target"] == str(pair[0])


@pytest.mark.parametrize(
    ("options", "words"),
    [
        (("--compile", "fast"), "--compile fast: must be one of off, auto, max"),
        (("--kv-dtype", "int4"), "--kv-dtype int4: must be one of auto, bfloat16, int8"),
        (("--quantize-target", "int5"), "--quantize-target int5: must be one of int8, int4"),
    ],
)
def test_errors_of_other_values_name_the_flag(
    run: Run, options: tuple[str, str], words: str
) -> None:
    done = run("tree-plan", *options)
    assert done.exit_code == 2
    assert done.stderr.startswith(f"error: {words}")


def test_a_class_of_options_becomes_options() -> None:
    """In the order of the parameters, with the types and defaults of the class."""

    @dataclass
    class Pair:
        left: int = 1
        right: str = "r"

    seen: list[object] = []

    def command(first: int, *, pair: Pair, last: bool = False) -> None:
        seen.extend((first, pair, last))

    flat = expanded(command)
    assert list(flat.__annotations__.items()) == [
        ("first", int),
        ("left", int),
        ("right", str),
        ("last", bool),
    ]
    flat(first=7, left=2, right="s", last=True)
    assert seen == [7, Pair(2, "s"), True]

"""The help page of every command at 80 columns: nothing is truncated, nothing overflows."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import typer
from typer.testing import Result

from outrider.cli import app

Run = Callable[..., Result]


def commands(group: Any, *path: str) -> Iterator[tuple[tuple[str, ...], Any]]:
    yield path, group
    for name in group.list_commands(None) if hasattr(group, "list_commands") else ():
        yield from commands(group.get_command(None, name), *path, name)


COMMANDS = dict(commands(typer.main.get_command(app)))


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "outrider")
def test_each_option_is_named_in_full_at_80_columns(run: Run, path: tuple[str, ...]) -> None:
    done = run(*path, "--help", env={"COLUMNS": "80"})
    assert done.exit_code == 0
    assert max(map(len, done.stdout.splitlines())) <= 80
    assert "…" not in done.stdout
    words = done.stdout.replace(",", " ").split()
    for param in COMMANDS[path].params:
        argument = param.param_type_name == "argument"
        names = [param.metavar] if argument else [*param.opts, *param.secondary_opts]
        for name in names:
            assert name in words
    for name in COMMANDS[path].commands if hasattr(COMMANDS[path], "commands") else ():
        assert name in words


@pytest.mark.parametrize("path", COMMANDS, ids=lambda path: " ".join(path) or "outrider")
def test_values_have_readable_names(path: tuple[str, ...]) -> None:
    """They are not named for Python's types."""
    for param in COMMANDS[path].params:
        assert param.metavar or getattr(param, "is_flag", False), param.name


def test_sections_and_defaults(run: Run) -> None:
    page = run("generate", "--help", env={"COLUMNS": "80"}).stdout
    titles = [line for line in page.splitlines() if line.endswith(":") and line[0].isupper()]
    wanted = ["Arguments:", "Options:", "Models:", "Speculation:", "Sampling:", "Output:"]
    assert [title for title in titles if title in wanted] == wanted
    assert "[default: fixed]" in page
    examples = [line for line in page.splitlines() if line.startswith("  outrider generate")]
    assert len(examples) >= 2


@pytest.mark.parametrize("flag", ["--target", "--model", "-m"])
def test_the_target_has_short_flags(run: Run, flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = {}

    def ask(models: Any, *_: object, **__: object) -> None:
        seen["target"] = models.target
        raise ZeroDivisionError

    monkeypatch.setattr("outrider.cli.generate.open_engine", ask)
    run("generate", "x", flag, "some-model", "--method", "suffix")
    assert seen == {"target": "some-model"}


@pytest.mark.parametrize("flag", ["--max-new-tokens", "-n"])
def test_the_number_of_tokens_has_a_short_flag(generate: Run, flag: str) -> None:
    assert generate("def f3(x):", flag, 5).stderr.startswith("5 tokens, ")

"""The application as a whole: help that starts fast, the version, the public names."""

import inspect
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from typing import Annotated, get_args

import pytest
import typer
from typer.testing import Result

import outrider
from outrider.cli.errors import as_flags
from outrider.cli.generate import generate
from outrider.cli.group import expanded
from outrider.engine import load
from outrider.sampling import Sampling

Run = Callable[..., Result]


def test_version(run: Run) -> None:
    assert run("--version").stdout == f"outrider {outrider.__version__}\n"


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"]])
def test_without_a_command_it_shows_help_with_an_example(run: Run, arguments: list[str]) -> None:
    result = run(*arguments)
    assert result.exit_code == 0
    for word in ("generate", "methods", "demo", "train", "outrider demo\n"):
        assert word.strip() in result.stdout
    assert max(map(len, result.stdout.splitlines())) <= 80


@pytest.mark.parametrize("command", ["generate", "methods", "demo", "train"])
def test_each_command_has_help_with_an_example(run: Run, command: str) -> None:
    result = run(command, "--help")
    assert result.exit_code == 0
    assert result.stdout.count(f"outrider {command}") >= 2  # the usage line, and an example


@pytest.mark.parametrize("arguments", [["--help"], ["methods", "--help"], ["generate", "--help"]])
def test_help_imports_no_torch(arguments: list[str]) -> None:
    program = (
        "import sys\nfrom outrider.cli import app\n"
        f"app({arguments!r}, standalone_mode=False)\n"
        "print({'torch', 'transformers', 'numpy'} & set(sys.modules), file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "set()\n")


def test_public_names_are_complete_and_resolve() -> None:
    assert len(outrider.__all__) == len(set(outrider.__all__))
    assert {"__version__", *outrider._HOME} == set(outrider.__all__)
    for name in outrider.__all__:
        assert getattr(outrider, name) is not None
    assert set(outrider.__all__) <= set(dir(outrider))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        outrider.nothing  # noqa: B018


def test_defaults_equal_those_of_the_python_interface() -> None:
    flags = inspect.signature(expanded(generate)).parameters
    engine = inspect.signature(load).parameters
    parts = {"stop", "logit_bias", "processors", "stateless", "forced", "grammar"}
    parts |= {"top_p_convention"}
    for field in fields(Sampling):
        if field.name not in parts:
            assert flags[field.name].default == field.default, field.name
    assert {"stop", "logit_bias"} <= set(flags)
    spelled = {"dtype": "auto"}  # None in Python
    negated = {
        "generation_config"
    }  # on by default in Python, where the command line has a flag to turn it off
    for name in negated:
        assert flags[f"no_{name}"].default is not engine[name].default
    own = negated | {"options", "verifier", "measure", "max_batch_size", "prefix_cache", "report"}
    own |= {"background", "make"}
    for name in engine.keys() - own:
        assert flags[name].default == spelled.get(name, engine[name].default), name


@pytest.mark.parametrize(
    ("python", "terminal"),
    [
        ("top_p=0: must be in (0, 1]", "--top-p 0: must be in (0, 1]"),
        ("take method='plain'", "take --method plain"),
        ("pass draft=..., or", "pass --draft NAME, or"),
        ("stop='': must be", "--stop '': must be"),
        ("a top_p of 0", "a top_p of 0"),
    ],
)
def test_errors_name_flags_instead_of_python_parameters(python: str, terminal: str) -> None:
    assert as_flags(python) == terminal


def test_options_say_their_names_themselves() -> None:
    """Typer 0.27 drops some of the options that do not."""
    kind = Annotated[str, typer.Option(help="A value.")]
    flag = Annotated[bool, typer.Option(help="A switch.")]

    def command(first_one: kind = "a", second: kind = "b", on: flag = False) -> None: ...  # type: ignore[valid-type]

    parameters = inspect.signature(expanded(command)).parameters
    names = {name: get_args(each.annotation)[1].param_decls for name, each in parameters.items()}
    assert names == {"first_one": ("--first-one",), "second": ("--second",), "on": ()}

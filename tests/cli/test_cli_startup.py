"""Help, the list of methods and shell completion import no heavy library."""

import json
import os
import subprocess
import sys
from collections.abc import Callable

import pytest
from typer.testing import Result

from outrider.methods import METHODS, catalogue
from outrider.methods.method import Method

Run = Callable[..., Result]
PROBE = """
import atexit, sys
heavy = ("torch", "transformers", "torchao", "numpy")
atexit.register(lambda: print([name for name in heavy if name in sys.modules], file=sys.stderr))
from outrider.cli import main
main()
"""


def probe(*arguments: str, **changes: str) -> subprocess.CompletedProcess[str]:
    """Runs a command in a process whose stderr ends with the heavy modules that it imported."""
    return subprocess.run(
        [sys.executable, "-c", PROBE, *arguments],
        capture_output=True,
        text=True,
        env={**os.environ, **changes},
    )


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["generate", "--help"], ["ngram", "build", "--help"], ["methods"]],
    ids=" ".join,
)
def test_help_and_methods_import_nothing_heavy(arguments: list[str]) -> None:
    done = probe(*arguments)
    assert (done.returncode, done.stderr) == (0, "[]\n")
    assert done.stdout


def test_a_missing_draft_is_noticed_before_anything_heavy_is_imported() -> None:
    done = probe("generate", "x", "--target", "nobody/nothing")
    assert done.returncode == 2
    message, modules = done.stderr.splitlines()
    assert "needs a draft model: pass --draft NAME" in message
    assert modules == "[]"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        ("outrider generate --method sp", ["speculative", "specinfer", "spectr"]),
        ("outrider gen", ["generate"]),
        ("outrider generate --compile ", ["off", "auto", "max"]),
    ],
)
def test_completion_imports_nothing_heavy_and_prints_only_names(
    words: str, expected: list[str]
) -> None:
    last = str(len(words.split(" ")) - 1)
    done = probe(_OUTRIDER_COMPLETE="complete_bash", COMP_WORDS=words, COMP_CWORD=last)
    assert (done.stdout.split(), done.stderr) == (expected, "[]\n")


def test_shells_with_descriptions_show_what_a_method_does() -> None:
    words = "outrider generate --method mento"
    done = probe(_OUTRIDER_COMPLETE="complete_zsh", _TYPER_COMPLETE_ARGS=words)
    assert METHODS["mentored"].summary in done.stdout.replace("\\", "")
    assert done.stderr == "[]\n"


def test_importing_the_package_imports_nothing_heavy_until_a_name_is_used() -> None:
    program = (
        "import sys, outrider, outrider.methods\n"
        "assert 'torch' not in sys.modules\n"
        "assert {'METHODS', 'find_method'} <= set(dir(outrider.methods))\n"
        "assert outrider.METHODS is outrider.methods.METHODS\n"
        "assert 'torch' in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_catalogue_is_current() -> None:
    assert catalogue.FILE.read_text(encoding="utf-8") == catalogue.as_json(METHODS.values()), (
        "the catalogue is out of date: run `python -m outrider.methods.catalogue`"
    )


def test_entries_match_the_methods() -> None:
    """Each entry, read back from the file, has the fields of its method."""
    assert list(catalogue.entries()) == list(METHODS)
    for name, entry in catalogue.entries().items():
        method: Method = METHODS[name]
        recipe = method.recipe()
        assert (entry.summary, entry.paper) == (method.summary, method.paper)
        assert (entry.lossless, entry.needs_draft) == (method.lossless, method.needs_draft)
        assert entry.greedy_only == recipe.greedy_only
        assert entry.bound["words"] == recipe.verifier.bound.words
        assert {o: each["default"] for o, each in entry.options.items()} == {
            option.name: option.plain for option in method.options.values()
        }


def test_methods_as_json_is_the_catalogue(run: Run) -> None:
    document = json.loads(run("methods", "--json").stdout)
    assert document == json.loads(catalogue.FILE.read_text(encoding="utf-8"))

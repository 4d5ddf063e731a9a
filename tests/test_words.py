"""Prose and identifiers use the field's terms: no retired word is left in the cleaned packages,
and every shape letter is declared.

Every line of a file is checked: code, comments, docstrings and messages. Identifiers are split into
their words first, so that ``DraftLaw`` and ``draft_law`` both contain "law".
"""

import ast
import re
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).parent.parent
PACKAGES = (
    "outrider/core",
    "outrider/sampling",
    "outrider/verifiers",
    "outrider/testing",
    "tests/core",
    "tests/sampling",
    "tests/verifiers",
    "tests/testing",
)
"""What is checked for all retired words; add a package here once it has been cleaned."""

EVERYWHERE = ("outrider", "benchmarks", "recipes", "scripts")
"""What is checked for the words that have no other meaning."""


class Retired(NamedTuple):
    """A retired word.

    Attributes:
        pattern: regular expression for the word, in lower case.
        replacement: what to write instead.
        allowed: regular expression for the exceptions, which are removed before the search.
        everywhere: whether the word has no other meaning in this project.
    """

    pattern: str
    replacement: str
    allowed: str | None = None
    everywhere: bool = False


RETIRED = (
    Retired(r"\bslabs?\b", "KV cache, KV buffer", r"buffers = \"slabs\"", everywhere=True),
    Retired(r"\blaw(s|less|ful)?\b", "distribution", everywhere=True),
    Retired(r"\bjudge(s|d|ments?)?\b", "verify, verifier, verification", everywhere=True),
    Retired(r"\brefus(e|es|ed|al|als|ing)\b", "reject (tokens), raise (errors)"),
    Retired(
        r"\blooks? (back )?at the device\b|\ba look back\b",
        "device-to-host synchronisation",
        everywhere=True,
    ),
    Retired(r"\b(batch.)?mates?\b", "other rows of the batch", everywhere=True),
    Retired(r"\bbook(s|ed|ing)?\b", "reserve", everywhere=True),
    Retired(r"\bopenings?\b", "decoder prompt tokens", r"\bopening (few|all) blocks\b"),
    Retired(r"\brealised\b|\bstrayed\b", "measured divergence", everywhere=True),
    Retired(r"\bstraight\b", "directly"),
    Retired(r"\bplaces?\b", "position (in a sequence), node (in a tree)", r"\bin.place\b"),
    Retired(r"\bcolumns?\b", "query tokens; index"),
    Retired(r"\bturns?\b", "round, step", r"\bturns?( \S+){0,6} (on|off|out|into)\b"),
    Retired(r"\btexts?\b", "sequence, output, continuation", r"\b(read|write|decoded) text\b"),
    Retired(r"\bbehind\b", "after", r"\bqueued behind\b|\bbehind the head.s sum\b"),
    Retired(r"\bwhole drafts?\b", "fully accepted draft"),
    Retired(r"\bplain twin\b", "reference implementation"),
    Retired(r"\brides?\b|\bruns? ahead\b", "drafts ahead", everywhere=True),
    Retired(r"\bhand(s|ed)? over\b", "provide"),
    Retired(r"\bwhoever\b|\bof whom\b|\bwhat hangs on\b", "name the actor"),
)


def findings(file: Path, words: Iterable[Retired] = RETIRED) -> Iterator[str]:
    """Each line with a retired word, as ``path:line: 'word' -> replacement``."""
    for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), 1):
        for retired in words:
            text = _words(line)
            if retired.allowed:
                text = re.sub(retired.allowed, "", text)
            if found := re.search(retired.pattern, text):
                yield f"{file}:{number}: {found[0]!r} -> {retired.replacement}"


def _words(line: str) -> str:
    """The line in lower case, with identifiers split into their words."""
    return re.sub(r"(?<=[a-z])(?=[A-Z])|_", " ", line).lower()


@pytest.mark.parametrize("package", PACKAGES)
def test_no_retired_word_is_left(package: str) -> None:
    files = sorted((ROOT / package).rglob("*.py"))
    assert files
    found = [each for file in files for each in findings(file)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("folder", EVERYWHERE)
def test_words_without_another_meaning_are_nowhere(folder: str) -> None:
    words = [retired for retired in RETIRED if retired.everywhere]
    files = sorted((ROOT / folder).rglob("*.py"))
    assert files
    found = [each for file in files for each in findings(file, words)]
    assert not found, "\n".join(found)


@pytest.mark.parametrize("package", [each for each in PACKAGES if each.startswith("outrider/")])
def test_every_shape_letter_is_in_the_legend(package: str) -> None:
    """Suffixes such as ``_BNV`` use letters that the module docstring declares."""
    for file in sorted((ROOT / package).rglob("*.py")):
        source = file.read_text(encoding="utf-8")
        legend = (ast.get_docstring(ast.parse(source)) or "").partition("Legend:")[2]
        suffixes = re.findall(r"\b_?[a-z]\w*_([A-Z0-9]{1,4})\b", source)
        used = {letter for suffix in suffixes for letter in suffix if letter.isalpha()}
        undeclared = {letter for letter in used if not re.search(rf"\b{letter}\b", legend)}
        assert not undeclared, f"{file}: no legend for {', '.join(sorted(undeclared))}"


@pytest.mark.parametrize(
    "line",
    [
        "the target's law, exactly",
        "class DraftLaw:",
        "draft_laws = []",
        "a slab of keys",
        "# elsewhere a look at the device costs more",
        "a row and its batch-mates",
        "place_BN = depth_BN",
    ],
)
def test_retired_words_are_found(tmp_path: Path, line: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(f"first\n{line}\n")
    (finding,) = findings(file)
    assert finding.startswith(f"{file}:2: ")
    assert " -> " in finding


@pytest.mark.parametrize(
    "line", ["a flaw in the claw", "replace(draft)", "writes in place", "return x", "estimates"]
)
def test_other_words_are_not_findings(tmp_path: Path, line: str) -> None:
    file = tmp_path / "module.py"
    file.write_text(line)
    assert not list(findings(file))

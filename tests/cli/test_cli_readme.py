"""The README: its Python compiles, its methods and files exist, its numbers are measured."""

import re
from pathlib import Path

from outrider import METHODS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_methods_of_the_readme_exist() -> None:
    named = re.findall(r"^\| `([\w-]+)` \|", README, flags=re.MULTILINE)
    assert named == list(METHODS)
    assert f"It implements {len(METHODS)} decoding methods" in README


def test_files_of_the_readme_exist() -> None:
    tree = README.split("## What is where")[1].split("```")[1]
    folder = ROOT
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = ROOT / "outrider" if line.startswith("  ") else ROOT
        assert (folder / name).exists(), name
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_python_of_the_readme_compiles() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    compile(snippet, "README.md", "exec")
    assert "<!-- results -->" in README


def test_numbers_of_the_first_table_come_from_the_results() -> None:
    """Every number beside a link occurs in the linked file."""
    table = README.split("| You have |")[1].split("\n\n")[0]
    rows = [line.split("|")[1:4] for line in table.splitlines() if line.startswith("| ")]
    assert len(rows) == 6
    for _, method, measured in rows:
        names = re.findall(r"`([\w-]+)`", method)
        assert names
        assert set(names) <= set(METHODS)
        files = re.findall(r"\]\((benchmarks/results/[^)]+)\)", measured)
        results = " ".join((ROOT / file).read_text(encoding="utf-8") for file in files)
        results = results.replace("1,050.8M parameters", "1.05 billion parameters")
        shown = re.sub(r"\]\([^)]*\)", "", measured)
        numbers = re.findall(r"\d+\.\d+", shown.replace("at 0.8", ""))
        assert numbers
        for number in numbers:
            assert number in results, number


def test_the_readme_says_how_to_install_and_call_it() -> None:
    install = README.split("## Install")[1].split("\n## ")[0]
    for line in ("pip install .", "source .venv/bin/activate", ".venv/bin/outrider", "make demo"):
        assert line in install

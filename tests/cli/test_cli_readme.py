"""The README: its Python compiles, its methods and files exist, its numbers are measured."""

import re
from pathlib import Path

import pytest

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


@pytest.mark.parametrize(
    ("page", "sections"),
    [
        ("peers.md", ["embedded pair in float32", "1B-cost pair in float32"]),
        (
            "avx512/peers.md",
            ["embedded pair in bfloat16", "embedded pair in float32", "1B-cost pair in bfloat16"],
        ),
    ],
)
def test_numbers_beside_peers_come_from_the_results(page: str, sections: list[str]) -> None:
    """A column of the table is a section of the page."""
    table = README.rsplit(f"](benchmarks/results/{page})", 1)[1].split("\n\n")[1]
    shown = [line.split("|")[2:-1] for line in table.splitlines()[2:]]
    text = (ROOT / "benchmarks" / "results" / page).read_text(encoding="utf-8")
    for column, section in enumerate(sections):
        found = {}
        for line in text.split(f"## The {section}\n")[1].split("\n## ")[0].splitlines():
            cells = [cell.strip() for cell in line.split("|")[1:-1]]
            if len(cells) == 9:
                found[cells[0], cells[1]] = cells
        ours = float(found["outrider", "speculative compiled"][4])
        assert float(shown[0][column]) == pytest.approx(ours, abs=0.5)
        peers = (
            ("transformers", "assisted"),
            ("openvino", "speculative"),
            ("llama.cpp", "speculative"),
            ("outrider", "plain compiled"),
        )
        for row, peer in zip(shown[1:], peers, strict=True):
            ratio = float(found[peer][8].rstrip("×"))
            assert float(row[column].split("×")[0]) == pytest.approx(ratio, abs=0.055), peer


def test_the_readme_says_how_to_install_and_call_it() -> None:
    install = README.split("## Install")[1].split("\n## ")[0]
    for line in ("pip install .", "source .venv/bin/activate", ".venv/bin/outrider", "make demo"):
        assert line in install

"""The README's Python compiles, and its methods and files exist."""

import re
from pathlib import Path

from outrider import METHODS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_methods_of_the_readme_exist() -> None:
    named = re.findall(r"^\| `([\w-]+)` \|", README, flags=re.MULTILINE)
    assert named == list(METHODS)


def test_files_of_the_readme_exist() -> None:
    tree = README.split("## What is where")[1].split("```")[1]
    folder = ROOT
    for line in tree.strip().splitlines():
        name = line.split()[0]
        folder = ROOT / "outrider" if line.startswith("  ") else ROOT
        assert (folder / name).exists(), name
    for link in re.findall(r"\]\(([^)#]+)\)", README):
        assert (ROOT / link).exists(), link


def test_python_of_the_readme_is_python() -> None:
    (snippet,) = re.findall(r"```python\n(.*?)```", README, flags=re.DOTALL)
    compile(snippet, "README.md", "exec")
    assert "<!-- results -->" in README

"""``outrider tree-plan`` on a tiny pair: its table, its JSON, its file, its errors."""

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import Result

from outrider.drafters.tree.topology import Topology

Run = Callable[..., Result]


@pytest.fixture
def plan(pair: tuple[Path, Path], run: Run) -> Run:
    """The command with the tiny pair, few nodes, and few rounds."""

    def call(*arguments: object) -> Result:
        target, draft = pair
        models = ("--target", target, "--draft", draft, "--dtype", "float32", "--device", "cpu")
        small = ("--num-nodes", 8, "--depth", 3, "--width", 4, "--rounds", 4)
        return run("tree-plan", *models, *small, *arguments)

    return call


def test_the_table_and_the_file(plan: Run, pair: tuple[Path, Path], tmp_path: Path) -> None:
    """With the target as its own draft, the first child is always accepted."""
    file = tmp_path / "tree.json"
    done = plan("--draft", pair[0], "--output", file, "--temperature", 0)
    assert done.exit_code == 0, done.output
    assert "Acceptance by rank, at 16 positions: 1.000  0.000" in done.output
    for text in ("Target pass by nodes, ms: 1:", "Draft pass, ms:", "best chain", "best tree"):
        assert text in done.output
    if file.exists():
        assert Topology.read(file).depth <= 3
        assert f"The tree is in {file}" in done.output.replace("\n", "")
    else:
        assert "No tree pays off here" in done.output


def test_json(plan: Run, tmp_path: Path) -> None:
    done = plan("--json")
    assert done.exit_code == 0, done.output
    found = json.loads(done.stdout)
    assert found["num_places"] == 16
    assert len(found["acceptance"]) == 4
    assert [row["name"] for row in found["plans"]] == ["best chain", "best tree"]
    assert list(found["target_seconds"]) == ["1", "2", "4", "8"]


def test_a_folder_that_is_not_there(plan: Run, tmp_path: Path) -> None:
    done = plan("--output", tmp_path / "missing" / "tree.json")
    assert done.exit_code == 2
    assert "there is no folder" in done.output
    assert "Traceback" not in done.output

"""The check of machine paths and registry hosts finds them, and nothing else."""

import importlib.util
from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope="module")
def check_tree() -> ModuleType:
    spec = importlib.util.spec_from_file_location("check_tree", ROOT / "scripts/check_tree.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize(
    "line",
    [
        "see /" + "home/someone/model",
        "cd /" + "root/x",
        '"/' + 'tmp/cache"',
        "C:\\" + "Users\\someone",
        "pip --index-url https://" + "pypi." + "org/simple",
        "https://download." + "pytorch.org/whl",
    ],
)
def test_tree_check_finds_machine_paths_and_registry_hosts(
    check_tree: ModuleType, tmp_path: Path, line: str
) -> None:
    file = tmp_path / "page.md"
    file.write_text(f"first\n{line}\n")
    (finding,) = check_tree.findings(file)
    assert finding.startswith(f"{file}:2: ")


@pytest.mark.parametrize(
    "line", ["~/work/x", "src/home/x", "/usr/bin/env", "a/opt/b", "https://x.io/home", "/path/to/x"]
)
def test_tree_check_ignores_other_paths(check_tree: ModuleType, tmp_path: Path, line: str) -> None:
    file = tmp_path / "page.md"
    file.write_text(line)
    assert check_tree.findings(file) == []

"""Which names ``transformers`` defines is stored, and found anew whenever a file has changed."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import transformers
from transformers.utils import import_utils

from outrider.imports.import_structure import stored


class Scan:
    """Finds the first line of each file in a folder, and counts the folders that it reads."""

    def __init__(self) -> None:
        self.num_folders = 0

    def __call__(self, path: str | os.PathLike[str]) -> dict[str, set[str]]:
        self.num_folders += 1
        folder = Path(path)
        folder = folder if folder.is_dir() else folder.parent
        return {file.name: {file.read_text()} for file in sorted(folder.rglob("*.py"))}


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one model; the cache folder is empty."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    folder = tmp_path / "models"
    (folder / "llama").mkdir(parents=True)
    (folder / "llama" / "modeling_llama.py").write_text("LlamaModel")
    return folder


def files(tmp_path: Path) -> list[Path]:
    return sorted((tmp_path / "cache" / "import_structure").iterdir())


def test_what_was_found_is_looked_up(models: Path) -> None:
    scan = Scan()
    by_folder = stored(scan, models)(models)
    assert by_folder == {"modeling_llama.py": {"LlamaModel"}}
    (models / "llama" / "__pycache__").mkdir()  # which running a module adds
    assert stored(scan, models)(str(models / "__init__.py")) == by_folder
    assert scan.num_folders == 1


def test_other_folders_are_read(models: Path) -> None:
    scan = Scan()
    for _ in range(2):
        stored(scan, models)(models / "llama")
    assert scan.num_folders == 2


@pytest.mark.parametrize("change", ["content", "time", "new", "gone", "source"])
def test_any_change_is_seen(models: Path, tmp_path: Path, change: str) -> None:
    source = tmp_path / "source.py"
    source.touch()
    scan = Scan()
    stored(scan, models, (str(source),))(models)
    file = models / "llama" / "modeling_llama.py"
    if change == "content":
        file.write_text("LlamaModel and more")
    elif change == "time":
        os.utime(file, ns=(0, 0))
    elif change == "new":
        (models / "llama" / "configuration_llama.py").write_text("LlamaConfig")
    elif change == "gone":
        file.unlink()
    else:
        source.write_text("another function")
    assert stored(scan, models, (str(source),))(models) == Scan()(models)
    assert scan.num_folders == 2


def test_a_damaged_file_is_replaced(models: Path, tmp_path: Path) -> None:
    scan = Scan()
    found = stored(scan, models)(models)
    (file,) = files(tmp_path)
    file.write_bytes(file.read_bytes()[:-3])
    assert stored(scan, models)(models) == stored(scan, models)(models) == found
    assert scan.num_folders == 2
    assert files(tmp_path) == [file]


def test_a_folder_that_cannot_be_written_is_no_error(models: Path, tmp_path: Path) -> None:
    (tmp_path / "cache").write_text("a file in the place of the folder")
    assert stored(Scan(), models)(models) == {"modeling_llama.py": {"LlamaModel"}}


def test_a_user_without_a_home_is_no_error(models: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_home() -> Path:
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("OUTRIDER_CACHE")
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", no_home)
    assert stored(Scan(), models)(models) == {"modeling_llama.py": {"LlamaModel"}}


def test_a_missing_folder_is_left_to_the_function(models: Path) -> None:
    scan = Scan()
    assert stored(scan, models / "none")(models / "none") == Scan()(models / "none")
    assert scan.num_folders == 1


def test_the_names_of_transformers_stay_the_same(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))
    models = Path(transformers.__file__).parent / "models"
    find = import_utils.create_import_structure_from_path
    folder = str(models / "llama")
    scanned = stored(find, models)(models)
    assert len(scanned) > 200
    assert stored(find, models)(models) == scanned
    assert scanned["llama"] == find(folder)


def test_a_second_process_looks_up_what_the_first_found(tmp_path: Path) -> None:
    code = (
        "import outrider\n"
        "from transformers.utils import import_utils\n"
        "from transformers import LlamaConfig\n"
        "print(import_utils.create_import_structure_from_path.__module__, LlamaConfig.model_type)"
    )
    for _ in range(2):
        done = subprocess.run(
            [sys.executable, "-c", code],
            env=os.environ | {"OUTRIDER_CACHE": str(tmp_path / "cache")},
            capture_output=True,
            text=True,
            check=True,
        )
        assert done.stdout.split() == ["outrider.imports.import_structure", "llama"]
        assert len(files(tmp_path)) == 1

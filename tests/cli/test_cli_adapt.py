"""``outrider generate --adapt`` learns from its output, and goes on where it stopped."""

import json
import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tiny_heads import tiny_head
from transformers import AutoModelForCausalLM
from typer.testing import Result

import outrider
from outrider.drafters.heads.formats.eagle3 import save_eagle3

Run = Callable[..., Result]
PROMPT = "def f3(x):"
LINE = r"adapted: version (\d+) after step (\d+), learned from \d+ positions? \| (.+)"


def adapted(result: Result) -> tuple[int, int, str]:
    """Version, step and folder of the summary."""
    assert result.exit_code == 0, result.stderr
    found = re.search(LINE, result.stderr)
    assert found is not None, result.stderr
    return int(found[1]), int(found[2]), found[3]


def test_the_output_stays_and_the_next_run_goes_on(generate: Run, tmp_path: Path) -> None:
    folder = tmp_path / "adapted"
    settings = (PROMPT, "-n", 24, "--temperature", 0)
    wanted = generate(*settings).stdout
    versions = []
    for _ in range(2):
        result = generate(*settings, "--adapt-folder", folder)
        assert result.stdout == wanted
        versions.append(adapted(result))
    (version, step, where), (later, more, _) = versions
    assert version == 1
    assert later > version
    assert more > step > 0
    assert Path(where) == folder
    document = json.loads((folder / "versions.json").read_text())
    assert document["versions"][-1]["number"] == later


def test_a_head_learns_too(
    run: Run, generate: Run, pair: tuple[Path, Path], tmp_path: Path
) -> None:
    target, head, folder = pair[0], tmp_path / "head", tmp_path / "adapted"
    save_eagle3(tiny_head(outrider.load_model(target, dtype="float32")), head)
    settings = (PROMPT, "-n", 24, "--temperature", 0)
    models = ("--target", target, "--draft", head, "--dtype", "float32", "--device", "cpu")
    wanted = generate(*settings).stdout
    versions = []
    for _ in range(2):
        result = run("generate", *models, *settings, "--adapt-folder", folder)
        assert result.stdout == wanted
        versions.append(adapted(result)[0])
    assert 0 < versions[0] < versions[1]


def test_without_a_folder_the_cache_has_one(
    generate: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    _, _, folder = adapted(generate(PROMPT, "--adapt"))
    assert Path(folder).parent == tmp_path / "adapted"
    assert (Path(folder) / "versions.json").exists()


def test_a_draft_that_was_trained_anew_begins_anew(
    generate: Run, pair: tuple[Path, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The weights at the same path are other ones."""
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    first, again = (adapted(generate(PROMPT, "--adapt"))[2] for _ in range(2))
    assert first == again
    draft = AutoModelForCausalLM.from_pretrained(pair[1])
    kept = {file: file.read_bytes() for file in pair[1].iterdir() if file.is_file()}
    try:
        for weight in draft.parameters():
            weight.data.mul_(1.01)
        draft.save_pretrained(pair[1])
        version, _, other = adapted(generate(PROMPT, "--adapt"))
    finally:
        for file, content in kept.items():
            file.write_bytes(content)
    assert other != first
    assert version == 1


def test_json_stays_one_document(generate: Run, tmp_path: Path) -> None:
    result = generate(PROMPT, "--json", "--adapt-folder", tmp_path)
    assert json.loads(result.stdout)["finish_reason"] == "length"


def test_a_method_without_a_draft_model(generate: Run) -> None:
    result = generate(PROMPT, "--adapt", "--method", "prompt-lookup")
    assert result.exit_code == 2
    assert "method 'prompt-lookup' has no draft model" in result.stderr

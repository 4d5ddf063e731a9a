"""``--paper-models``: each recipe whose paper's models are public, on tiny ones in their place."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import byte_tokenizer, tiny_module
from tiny_seq2seq import tiny_seq2seq_module

from recipes.reproduce import __main__ as command_line
from recipes.reproduce.catalogue import RECIPES
from recipes.reproduce.papers import leviathan_tables
from recipes.reproduce.recipe import PaperModels

PUBLIC = [each for each in RECIPES if each.models is not None]
OFF = ["--compile", "off"]
SIZE = ["--prompts", "2", "--tokens", "6", "--repeats", "1"]
LONGEST = 2048  # bytes of a prompt


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, PaperModels]:
    """Pairs of a decoder and of an encoder-decoder, in folders like those of the hub."""
    folder = tmp_path_factory.mktemp("models")
    words = byte_tokenizer()
    for seed, role in enumerate(("target", "draft")):
        size = len(words)
        decoder = tiny_module(seed=seed, vocab_size=size, max_position_embeddings=LONGEST)
        for kind, module in (
            ("decoder", decoder),
            ("seq2seq", tiny_seq2seq_module("t5", seed=seed, vocab_size=size)),
        ):
            module.save_pretrained(folder / kind / role)
            words.save_pretrained(folder / kind / role)
    return {
        kind: PaperModels(str(folder / kind / "target"), (str(folder / kind / "draft"),))
        for kind in ("decoder", "seq2seq")
    }


@pytest.mark.slow
@pytest.mark.parametrize("name", [each.name for each in PUBLIC])
def test_recipes_run_on_the_models_of_their_papers(
    name: str, models: dict[str, PaperModels], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Random models show no effects; a recipe runs if it comes to a verdict about them."""
    (recipe,) = (each for each in PUBLIC if each.name == name)
    assert recipe.models is not None
    kind = "seq2seq" if "t5" in recipe.models.target else "decoder"
    monkeypatch.setattr(leviathan_tables, "MEGABYTES", 0.02)
    monkeypatch.setattr(command_line, "RECIPES", (replace(recipe, models=models[kind]),))
    results = tmp_path / "results"
    folders = ["--out", tmp_path / "out", "--results", results, "--page-folder", tmp_path / "pages"]
    command_line.main([name, "--quick", "--paper-models", *SIZE, *OFF, *map(str, folders)])
    document = json.loads((results / f"{name}.json").read_text())
    assert document["verdict"] != "not testable here", document["reason"]
    assert document["effects"]
    assert document["about"]["target"] == models[kind].target
    assert (document["about"]["prompts"], document["about"]["repeats"]) == (2, 1)
    assert document["about"]["command"].endswith(" ".join(SIZE))
    assert (tmp_path / "pages" / f"{name}.md").is_file()

"""The drafts that come with the package for other targets: their size, and how they are named."""

import re

import pytest

from outrider import load
from outrider.assets import NAMED, named_path
from outrider.core.errors import IncompatibleError, ModelLoadError
from outrider.drafters.heads.kinds import format_of
from outrider.lab.model_files import fingerprint
from outrider.runtime import load_model

HEAD, DRAFT = "embedded:smollm2-eagle3", "embedded:smollm2-draft"


def test_every_draft_is_there_and_together_they_are_small():
    total = 0
    for name in NAMED:
        folder = named_path(f"embedded:{name}")
        assert folder is not None
        assert (folder / "README.md").exists()
        total += sum(file.stat().st_size for file in folder.iterdir())
    assert total <= 40e6


def test_a_heads_name_is_recognised_as_its_folder_is():
    head = format_of(HEAD)
    assert head is not None
    assert head.kind == "eagle3"
    assert named_path("smollm2-eagle3") is None
    assert named_path(None) is None


def test_a_draft_model_is_loaded_by_its_name_as_from_its_folder():
    assert format_of(DRAFT) is None
    folder = named_path(DRAFT)
    model = load_model(DRAFT, dtype="float32", device="cpu", role="draft")
    assert model.module.config.vocab_size == 49_152
    assert model.tokenizer is not None
    assert fingerprint(DRAFT, "draft") == fingerprint(str(folder), "draft")


@pytest.mark.parametrize("name", ["embedded:other", "embedded:"])
def test_an_unknown_draft_is_refused_with_those_there_are(name):
    expected = f"no draft {name!r} comes with outrider; there are: {HEAD}, {DRAFT}"
    with pytest.raises(ModelLoadError, match=re.escape(expected)):
        load(draft=name)
    with pytest.raises(ModelLoadError, match=re.escape(expected)):
        load_model(name)


def test_a_head_of_another_target_is_refused_by_name():
    with pytest.raises(Exception, match="hidden"):
        load(draft=HEAD)


def test_a_draft_of_another_target_is_refused_by_name():
    with pytest.raises(IncompatibleError, match="vocabular"):
        load(draft=DRAFT)

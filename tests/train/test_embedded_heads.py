"""The heads that come with the package: their size, and how they are named."""

import re

import pytest

from outrider import load
from outrider.assets import HEADS, head_path
from outrider.core.errors import ModelLoadError
from outrider.drafters.heads.kinds import format_of


def test_every_head_is_there_and_is_small():
    total = 0
    for name in HEADS:
        folder = head_path(f"embedded:{name}")
        assert folder is not None
        assert (folder / "README.md").exists()
        total += sum(file.stat().st_size for file in folder.iterdir())
    assert total <= 40e6


def test_a_heads_name_is_recognised_as_its_folder_is():
    head = format_of("embedded:smollm2-eagle3")
    assert head is not None
    assert head.kind == "eagle3"
    assert head_path("smollm2-eagle3") is None
    assert head_path(None) is None


def test_an_unknown_head_is_refused_with_those_there_are():
    expected = "no head 'embedded:other' comes with outrider; there are: embedded:smollm2-eagle3"
    with pytest.raises(ModelLoadError, match=re.escape(expected)):
        load(draft="embedded:other")


def test_a_head_of_another_target_is_refused_by_name():
    with pytest.raises(Exception, match="hidden"):
        load(draft="embedded:smollm2-eagle3")

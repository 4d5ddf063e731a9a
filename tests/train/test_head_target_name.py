"""What a saved head calls its target: the name that the user gives, for every kind."""

from pathlib import Path

import pytest
import torch
from tiny_heads import target_of

from outrider.train.heads.kind import Ground
from outrider.train.heads.kinds import HEAD_KINDS

TARGET = target_of()


@pytest.mark.parametrize("kind", HEAD_KINDS)
def test_the_target_has_the_name_that_it_was_given(kind: str, tmp_path: Path) -> None:
    """Without it, a head would publish the folder that the target was loaded from."""
    row = HEAD_KINDS[kind]
    counts_V = torch.arange(TARGET.num_tokens)
    ground = Ground(TARGET, counts_V, 0, target_name="somebody/target")
    training = row.build(ground, **row.values({"draft_vocab_size": 17}))
    training.save(tmp_path / "head")
    assert '"somebody/target"' in (tmp_path / "head" / "config.json").read_text()

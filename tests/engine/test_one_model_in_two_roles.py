"""A model as its own draft: everything is accepted, and each role has its own clock."""

import pytest
from tiny_models import greedy, tiny

from outrider import load


def test_clocks_and_health_are_separate() -> None:
    model = tiny()
    engine = load(model, model, num_speculative_tokens=3)
    assert engine.draft is not None
    assert engine.draft is not model
    assert engine.draft.module is model.module
    stats = engine.generate([[1, 2, 3]], greedy(12)).stats
    assert stats.acceptance_rate == 1
    assert 0 < stats.draft_seconds == pytest.approx(engine.draft.watch.seconds())
    assert 0 < stats.target_seconds == pytest.approx(engine.target.watch.seconds())
    assert stats.other_seconds > 0

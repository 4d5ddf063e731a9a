"""Every named method's drafter keeps the contract; a new method is tested here by its row alone.

That tokens are drawn from the declared distributions is counted in the drafters' own files.
"""

from typing import Any

import pytest
import torch
from real_tokenizers import worded
from tiny_models import random_head
from tiny_ngrams import tiny_file

from outrider import Sampling
from outrider.core import Drafter
from outrider.methods import METHODS, Parts
from outrider.sampling import Warp
from outrider.testing import check_drafter

TARGET, DRAFT = worded(0, std=0.2), worded(3, std=0.2)
VOCAB_SIZE = TARGET.num_tokens
WHOLE_OUTPUT = ("mjgd", "beam-search")
"""They propose all that a round emits, one token more than the budget allows a draft."""
OPTIONS: dict[str, dict[str, object]] = {
    "bild": {"mode": "mjsd"},  # the original is defined at temperature 0 only
    "ngram": {"file": tiny_file()},
    "suffix": {"corpus_tokens": 0},  # a corpus lets drafts depend on rows that have left
}


def drafter_of(method: str) -> Drafter[Any]:
    recipe = METHODS[method].recipe(OPTIONS.get(method))
    kind = METHODS[method].needs_head
    head = None if kind is None else random_head(kind, TARGET)
    return recipe.build(Parts(TARGET, DRAFT, num_speculative_tokens=4, head=head))


def distribution(num_rows: int) -> Warp:
    return Warp([Sampling(temperature=0.8)] * num_rows, VOCAB_SIZE)


@torch.inference_mode()
@pytest.mark.parametrize("method", [name for name in METHODS if name not in WHOLE_OUTPUT])
def test_contract(method: str) -> None:
    """Shapes, order, budgets and capabilities; a row alone drafts as in a batch, after commits, a
    rollback, and as rows leave and join."""
    drafter = drafter_of(method)
    layers = drafter.capabilities.hidden_layers
    target = TARGET.with_hidden_states(layers) if layers else None
    check_drafter(drafter, VOCAB_SIZE, distribution=distribution, num_samples=0, target=target)


@pytest.mark.parametrize("method", METHODS)
def test_capabilities_name_the_models_that_run(method: str) -> None:
    models = drafter_of(method).capabilities.models
    assert (DRAFT in models) == METHODS[method].needs_draft
    assert TARGET not in models, "the target has a timer and a health check of its own"


@pytest.mark.parametrize("method", METHODS)
def test_a_declared_depth_is_a_draft_length(method: str) -> None:
    depth = drafter_of(method).capabilities.depth
    assert depth is None or 1 <= depth <= 64

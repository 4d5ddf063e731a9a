"""EAGLE-3 heads and every rule that verifies their drafts: the output has the target's distribution
exactly, and at temperature 0 it is plain decoding's.

The head's vocabulary lacks a token, so q is zero where p is not.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from tiny_heads import target_of, tiny_head
from tiny_models import engine_of, greedy, ragged_prompts, token_ids

from outrider import Sampling
from outrider.core import Verifier
from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.eagle3 import (
    Eagle3Drafter,
    Eagle3DynamicTreeDrafter,
    Eagle3Model,
    Eagle3TreeDrafter,
)
from outrider.drafters.lookup.suffix import SuffixDecoding
from outrider.drafters.sources.hybrid import Hybrid, Order
from outrider.drafters.sources.sources import Source
from outrider.drafters.tree.topology import Topology
from outrider.engine import Engine
from outrider.methods import METHODS
from outrider.methods import hybrid as hybrid_methods
from outrider.sampling import Warp
from outrider.testing import chi2, enumerate_round
from outrider.verifiers import Block, Distinct, Rejection, SampleMatch, Traversal

V = 3
TARGET = target_of(V, dtype=torch.float64, std=0.1)
HEAD = tiny_head(TARGET, V - 1)
MODEL = Eagle3Model(HEAD, TARGET)
TREE = Topology.expansion([2, 1])


def hybrid(least: int) -> Hybrid:
    """Copies where a match predicts so many tokens, else the head."""
    copies = Source(SuffixDecoding(min_prob=0.1, corpus_tokens=0), 2)
    return Hybrid([copies, Source(Eagle3Drafter(MODEL, V), 2, 0.1)], Order([least, 1]), V)


def tree_hybrid(least: int) -> Hybrid:
    """Copies where a match predicts so many tokens, else the head's tree."""
    copies = Source(SuffixDecoding(min_prob=0.1, corpus_tokens=0), 2)
    tree = Eagle3TreeDrafter(MODEL, V, TREE, "distinct")
    return Hybrid([copies, Source(tree, 2, 0.1)], Order([least, 1]), V)


PAIRS: dict[str, tuple[Callable[[], Any], Verifier]] = {
    "chain, rejection": (lambda: Eagle3Drafter(MODEL, V), Rejection()),
    "chain, block": (lambda: Eagle3Drafter(MODEL, V), Block()),
    "tree, distinct": (lambda: Eagle3TreeDrafter(MODEL, V, TREE, "distinct"), Distinct()),
    "tree, traversal": (lambda: Eagle3TreeDrafter(MODEL, V, TREE, "distinct"), Traversal()),
    "dynamic tree": (lambda: Eagle3DynamicTreeDrafter(MODEL, V, 5, 2, 2), SampleMatch()),
    "copies, then chain, rejection": (lambda: hybrid(2), Rejection()),
    "chain beside copies, block": (lambda: hybrid(3), Block()),
    "copies, then tree, distinct": (lambda: tree_hybrid(2), Distinct()),
    "tree beside copies, distinct": (lambda: tree_hybrid(3), Distinct()),
}


def warm(num_rows: int) -> Warp:
    return Warp([Sampling(temperature=0.8, top_p=0.9)] * num_rows, V)


@torch.inference_mode()
@pytest.mark.parametrize("pair", PAIRS)
def test_enumerated(pair: str) -> None:
    """ENUM over one round behind a prompt of four tokens; some drafts are accepted whole."""
    make, verifier = PAIRS[pair]
    drafter = make()
    target = TARGET.with_hidden_states(drafter.capabilities.hidden_layers)
    done = enumerate_round(target, drafter, verifier, 2, prompt=(0, 2, 1, 1), distribution=warm)
    assert done.total_variation < 1e-12
    assert sum(mass for tokens, mass in done.emitted.items() if len(tokens) == 3) > 0.01


@torch.inference_mode()
@pytest.mark.parametrize("pair", PAIRS)
def test_sampled(pair: str) -> None:
    """CHI2 over the first four tokens, several rounds. False alarms: 1e-4 for another seed."""
    make, verifier = PAIRS[pair]
    drafter = make()
    target = TARGET.with_hidden_states(drafter.capabilities.hidden_layers)
    p_value = chi2(target, drafter, verifier, 2, prompt=(0, 2, 1), num_rows=6000, distribution=warm)
    assert p_value > 1e-4


@pytest.mark.parametrize("method", [name for name in METHODS if name.startswith("eagle3")])
def test_greedy_output_is_plain_decodings(method: str) -> None:
    """Ragged rows that leave and join, a prompt of one token among them."""
    target, prompts = target_of(), ragged_prompts([9, 1, 4, 12], 23)
    samplings = [greedy(9), greedy(20), greedy(5), greedy(14)]
    head = tiny_head(target, 17)
    engine = Engine(target, head, METHODS[method], max_batch_size=2)
    found = engine.generate(prompts, samplings)
    wanted = engine_of(target).generate(prompts, samplings)
    assert token_ids(found) == token_ids(wanted)
    assert found.stats.drafted > 0


def test_limited_memory_and_quantised_caches() -> None:
    """The head's cache counts below ``max_memory``, so that rows wait; the output is the same."""
    target, prompts = target_of(), ragged_prompts([9, 1, 4, 12], 23)
    head, settings = tiny_head(target, 17), {"max_batch_size": 4}
    wanted = Engine(target, head, METHODS["eagle3"], **settings).generate(prompts, greedy(8))
    small = Engine(target, head, METHODS["eagle3"], **settings, max_memory="48KiB")
    assert token_ids(small.generate(prompts, greedy(8))) == token_ids(wanted)
    (model,) = small.drafter.capabilities.models
    assert model.plan.memory_budget is not None
    quantised = Engine(target, head, METHODS["eagle3"], **settings, kv_dtype="int8")
    plain = engine_of(target, kv_dtype="int8")
    found = quantised.generate(prompts, greedy(8))
    assert token_ids(found) == token_ids(plain.generate(prompts, greedy(8)))


@pytest.mark.parametrize("name", ["eagle3-hybrid", "eagle3-tree-hybrid"])
def test_a_head_beside_copies_knows_all_committed_tokens(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those of rounds that copies drafted, too, in ragged rows; a row alone has the same output."""
    rounds: list[bool] = []

    kind = "Eagle3TreeDrafter" if "tree" in name else "Eagle3Drafter"
    base: Any = getattr(hybrid_methods, kind)

    class Checked(base):  # type: ignore[misc]
        def propose(self, state: Any, context: Any, budget: Any, rng: Any) -> Any:
            cache = state.features
            assert cache.known.host == [length - 1 for length in context.lengths]
            newest = cache.newest
            for row, (num, length) in enumerate(zip(newest.num.host, context.lengths, strict=True)):
                last = context.tokens_BT[row, length - num : length]
                assert torch.equal(newest.tokens_BK[row, :num], last)
            rounds.append(max(newest.num.host) > 6)
            return super().propose(state, context, budget, rng)

    monkeypatch.setattr(hybrid_methods, kind, Checked)
    target = target_of()
    prompts = [[*prompt, *prompt] for prompt in ragged_prompts([9, 4, 12], 23)]
    method, options = METHODS[name], {"suffix_least": 1}
    settings = {"max_batch_size": 2, "options": options}
    engine = Engine(target, tiny_head(target, 17), method, **settings)
    sampling = Sampling(temperature=0.7, seed=5, max_new_tokens=40, ignore_eos=True)
    found = engine.generate(prompts, sampling)
    assert any(rounds)  # the rounds before had copies
    assert not all(rounds)
    alone = engine.generate([prompts[0]], sampling)
    assert token_ids(alone) == token_ids(found)[:1]


def test_only_one_head_beside_other_sources() -> None:
    head = Source(Eagle3Drafter(MODEL, V), 2, 0.1)
    with pytest.raises(InvalidParameterError, match="give one head at most"):
        Hybrid([head, head], Order([1, 1]), V)


def test_a_hybrids_options_are_checked() -> None:
    with pytest.raises(InvalidParameterError, match="verify_cost=-1"):
        Engine(
            target_of(),
            tiny_head(target_of(), 17),
            METHODS["eagle3-hybrid"],
            options={"verify_cost": -1},
        )

"""Trees in the engine: depth, statistics, log-probabilities, and invalid topologies."""

from pathlib import Path

import pytest
import torch
from tiny_models import engine_of, full_logits, greedy, ragged_prompts, tiny, token_ids

from outrider import Engine, Sampling
from outrider.core.errors import InvalidParameterError, OutriderError
from outrider.drafters.tree.topology import Topology
from outrider.methods import METHODS
from outrider.methods.trees import TREES

TARGET = tiny("llama", 0, dtype=torch.float64)
DRAFT = tiny("llama", 3, dtype=torch.float64)
PROMPTS = ragged_prompts([5, 2, 8])
SAMPLING = Sampling(temperature=0.9, max_new_tokens=24, ignore_eos=True, logprobs=2)
NAMES = [method.name for method in TREES]
PLANNED = ["specinfer", "sequoia", "top-k-tree", "traversal"]
LOPSIDED = Topology.rank_paths([[0], [1], [2], [0, 0], [0, 1], [0, 0, 0]])


@pytest.mark.parametrize("name", PLANNED)
def test_gamma_limits_the_depth_of_a_tree(name: str) -> None:
    def engine(gamma: int | None) -> Engine:
        options = {"topology": "2,1,1"}
        return Engine(TARGET, DRAFT, METHODS[name], num_speculative_tokens=gamma, options=options)

    for gamma, depth, nodes in ((None, 3, 6), (2, 2, 4), (9, 3, 6)):
        stats = engine(gamma).generate(PROMPTS[:1], greedy(13)).stats
        assert len(stats.tried_at) == depth
        assert 0 < stats.drafted <= nodes * stats.rounds
    assert engine(None).num_speculative_tokens == 3
    assert Engine(TARGET, DRAFT, METHODS["speculative"]).num_speculative_tokens == 5


@pytest.mark.parametrize("name", [name for name in NAMES if name != "dynamic-tree"])
def test_a_draft_by_the_target_itself_is_accepted_down_to_a_leaf(name: str) -> None:
    """At temperature 0, each round but the last emits one token more than the tree's depth."""
    engine = engine_of(TARGET, TARGET, name, 4)
    depth = 4
    result = engine.generate(PROMPTS[:1], greedy(3 * (depth + 1)))[0]
    assert result.stats.rounds == 3
    assert result.stats.acceptance_by_position == [1.0] * depth
    assert result.origins == (*["accepted"] * depth, "bonus") * 3


@pytest.mark.parametrize("name", NAMES)
def test_counts_agree_with_origins(name: str) -> None:
    """Leaves have several depths. After an accepted short leaf, nothing counts as rejected."""
    options = {"topology": LOPSIDED} if name in PLANNED else {}
    for result in engine_of(TARGET, DRAFT, name, 3, options=options).generate(PROMPTS, SAMPLING):
        stats, origins = result.stats, result.origins
        assert stats.accepted == origins.count("accepted")
        assert stats.rounds == len(origins) - stats.accepted
        assert stats.verified - stats.accepted == origins.count("correction")
        assert sum(stats.tried_at) == stats.verified
        assert sum(stats.accepted_at) == stats.accepted
        assert 0 < stats.alpha < 1
        assert stats.alpha == pytest.approx(stats.overlap / stats.reached)


def test_an_accepted_leaf_above_the_deepest_level_is_followed_by_a_bonus_token() -> None:
    """The second child is a leaf, so at temperature 0 a bonus token follows it."""
    forked = Topology.rank_paths([[0], [1], [0, 0]])
    engine = engine_of(TARGET, DRAFT, "top-k-tree", 2, options={"topology": forked})
    results = engine.generate(ragged_prompts([4] * 40), greedy(2))
    short = [r for r in results if r.stats.rounds == 1 and r.origins == ("accepted", "bonus")]
    leaf = [r for r in short if r.stats.verified == 1]
    assert leaf, "no prompt whose second-best token is the target's: the test shows nothing"


@pytest.mark.parametrize("name", NAMES)
def test_log_probabilities_are_the_targets(name: str) -> None:
    for result in engine_of(TARGET, DRAFT, name, 4).generate(PROMPTS, SAMPLING):
        tokens = [*result.prompt_ids, *result.token_ids]
        logits_TV = full_logits(TARGET.module, tokens)[len(result.prompt_ids) - 1 : -1]
        log_p_TV = logits_TV.log_softmax(-1)
        expected_T = log_p_TV.gather(1, torch.tensor(result.token_ids)[:, None])[:, 0]
        torch.testing.assert_close(
            torch.tensor(result.logprobs, dtype=torch.float64), expected_T, atol=1e-6, rtol=1e-6
        )
        best_T2 = log_p_TV.topk(2).indices.tolist()
        assert [list(top.token_ids) for top in result.top_logprobs] == best_T2


@pytest.mark.parametrize("name", NAMES)
def test_stops_and_a_full_context_cut_a_tree(name: str) -> None:
    engine = engine_of(TARGET, DRAFT, name, 4)
    whole = engine.generate(PROMPTS, greedy(12))
    stop = whole[1].token_ids[4]
    sampling = Sampling(temperature=0, max_new_tokens=12, stop=stop, ignore_eos=True)
    cut = engine.generate(PROMPTS, sampling)[1]
    first = whole[1].token_ids.index(stop)
    assert cut.token_ids[:first] == whole[1].token_ids[:first]
    assert (cut.finish_reason, len(cut.token_ids) <= first + 1) == ("stop", True)
    rooms = [greedy(1), greedy(2), greedy(7)]
    assert [len(ids) for ids in token_ids(engine.generate(PROMPTS, rooms))] == [1, 2, 7]


def test_a_topology_comes_from_widths_a_file_or_an_object(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    LOPSIDED.write(file)
    method = METHODS["sequoia"]
    texts = set()
    for topology in (LOPSIDED, str(file)):
        engine = engine_of(TARGET, DRAFT, method, 3, options={"topology": topology})
        texts.add(tuple(token_ids(engine.generate(PROMPTS, SAMPLING))))
    assert len(texts) == 1


@pytest.mark.parametrize(
    ("topology", "expected"),
    [
        ("3,0", r"topology='3,0': widths\[1\]=0: must be a whole number, at least 1"),
        ("20,20", r"topology='20,20': .*more than 255 nodes"),
        ("4,x", r"topology='4,x': must be whole numbers such as '4,2,1' .*, or a file"),
        ("no-such.json", r"topology='no-such.json': cannot be read"),
        ("", r"topology='': must be widths such as '4,2,1', a file"),
        (7, r"topology=7: must be widths"),
    ],
)
def test_malformed_topologies_are_refused(topology: object, expected: str) -> None:
    with pytest.raises(InvalidParameterError, match=expected):
        METHODS["sequoia"].recipe({"topology": topology})


def test_sizes_out_of_range_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="num_chains=0"):
        engine_of(TARGET, DRAFT, "spectr", 4, options={"num_sequences": 0})
    with pytest.raises(
        InvalidParameterError, match="40 chains of 8 tokens: 255 nodes are the most"
    ):
        engine_of(TARGET, DRAFT, "spectr", 8, options={"num_sequences": 40})
    with pytest.raises(OutriderError, match="children='many'"):
        METHODS["traversal"].recipe({"children": "many"})


def test_a_tree_wider_than_the_support_drafts_the_whole_support() -> None:
    """Siblings without replacement: at most three of twelve, if the support has three tokens."""
    sampling = Sampling(temperature=1, top_k=3, max_new_tokens=9, ignore_eos=True)
    engine = engine_of(TARGET, DRAFT, "sequoia", 4, options={"topology": "12,2"})
    stats = engine.generate(PROMPTS, sampling).stats
    assert stats.rounds < stats.drafted <= stats.rounds * (3 + 6)

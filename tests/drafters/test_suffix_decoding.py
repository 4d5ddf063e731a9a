"""Suffix decoding: automaton and drafts against exhaustive counts, and the method's outputs."""

from collections import Counter
from collections.abc import Sequence
from random import Random

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.core import Budget, Context, RemembersOutputs
from outrider.core.errors import InvalidParameterError
from outrider.drafters.lookup.host import Tree
from outrider.drafters.lookup.suffix import Expand, Shape, SuffixDecoding, SuffixReader
from outrider.drafters.lookup.suffix_corpus import Corpus, Cursor
from outrider.drafters.lookup.suffix_index import MAX_CHILDREN, SEPARATOR, SuffixIndex
from outrider.testing import (
    SoftmaxDistribution,
    ToyModel,
    check_drafter,
    enumerate_round,
    greedy_distribution,
)
from outrider.verifiers import Block, Greedy, Rejection

REPETITIVE = (0, 1, 2, 0, 1, 0, 1, 2, 0, 1)


def texts(num: int, longest: int = 40) -> list[list[int]]:
    """Random sequences of few tokens."""
    random = Random(0)
    return [
        [random.randrange(random.choice([2, 3, 5])) for _ in range(random.randint(1, longest))]
        for _ in range(num)
    ]


def places(text: Sequence[int], string: Sequence[int]) -> list[int]:
    """The positions behind a string in a sequence."""
    n = len(string)
    return [end for end in range(n, len(text) + 1) if tuple(text[end - n : end]) == tuple(string)]


def state_of(index: SuffixIndex, string: Sequence[int]) -> int:
    state = 0
    for token in string:
        state = index.step(state, token)
        assert state
    return state


# -------------------------------------------------------------------------------- the automaton


def test_every_substring_has_its_count_latest_position_and_continuations() -> None:
    for text in texts(80):
        index = SuffixIndex()
        index.extend(text)
        strings = {tuple(text[i:j]) for j in range(len(text) + 1) for i in range(j)}
        for string in strings:
            state = state_of(index, string)
            ends = places(text, string)
            assert (index.count[state], index.end[state]) == (len(ends), ends[-1])
            following = Counter(text[end] for end in ends if end < len(text))
            found = {index.token(child): index.count[child] for child in index.children(state)}
            assert found == following
            assert index.num_followed(state) == sum(following.values())
            unseen = set(range(6)).difference(following)
            assert not any(index.step(state, token) for token in unseen)


def longest_match(text: Sequence[int], known: Sequence[int]) -> int:
    """Length of the longest suffix of a sequence that occurs in another."""
    return max(n for n in range(len(text) + 1) if not n or places(known, text[len(text) - n :]))


def test_the_suffix_link_is_the_longest_suffix_that_occurred_before() -> None:
    for text in texts(200):
        index = SuffixIndex()
        index.extend(text)
        matched = index.length[index.link[index.last]]
        assert matched == max(
            n for n in range(len(text)) if not n or len(places(text, text[len(text) - n :])) > 1
        )


def test_a_cursor_has_the_longest_match() -> None:
    index = SuffixIndex()
    index.extend(REPETITIVE)
    for text in texts(60):
        cursor = Cursor(index)
        cursor.extend(text)
        assert cursor.matched == longest_match(text, REPETITIVE)


def test_a_cursor_stays_right_while_the_automaton_grows() -> None:
    """Growth may split the cursor's state. A match that becomes longer because of it need not be
    noticed."""
    random = Random(3)
    for text in texts(60):
        index, known = SuffixIndex(), []
        cursor = Cursor(index)
        for place, token in enumerate(text):
            more = [random.randrange(3) for _ in range(random.randint(0, 4))]
            index.extend(more)
            known += more
            cursor.extend([token])
            seen = text[: place + 1]
            assert cursor.matched <= longest_match(seen, known)
            if cursor.matched:
                string = seen[len(seen) - cursor.matched :]
                assert cursor.state() == state_of(index, string)
                assert index.count[cursor.state()] == len(places(known, string))


def test_a_repetitive_sequence_costs_no_more_per_token() -> None:
    """Links are followed up to a bound; matches stay right, only the shortest have low counts."""
    index = SuffixIndex()
    index.extend([7] * 3000)
    assert index.length[index.link[index.last]] == 2999
    assert index.count[state_of(index, [7] * 2980)] == 21
    assert index.count[state_of(index, [7])] < 3000


@pytest.mark.parametrize("num_tokens", [2, 5, 60])
def test_forgotten_tokens_leave_no_trace(num_tokens: int) -> None:
    """Property: pieces are read and forgotten in any order, also after the table grew; then states
    and transitions are those of an automaton that read the sequence once."""
    random = Random(num_tokens)
    index, text = SuffixIndex(), []
    for _ in range(300):
        piece = [random.randrange(num_tokens) for _ in range(random.randint(0, 9))]
        index.extend(piece)
        num = random.randint(0, min(12, len(text) + len(piece), index.num_forgettable))
        index.forget(num)
        text = [*text, *piece][: len(text) + len(piece) - num]
        once = SuffixIndex()
        once.extend(text)
        held, anew = ({k: v for k, v in vars(i).items() if k != "_log"} for i in (index, once))
        assert len(held.pop("_slots")) >= len(anew.pop("_slots"))
        assert held == anew
    for state in range(len(index.length)):
        found = [index.step(state, token) for token in range(num_tokens)]
        assert found == [once.step(state, token) for token in range(num_tokens)]


def test_a_reader_forgets_any_number_of_tokens() -> None:
    """Also more than the automaton's log holds; it drafts like a reader that never read them."""
    random, corpus = Random(5), Corpus(2000)
    corpus.add([random.randrange(4) for _ in range(300)])
    expand = Expand("chain", 2.0, 0.1)
    for num in (1, 20, 64, 65, 200):
        kept = [random.randrange(4) for _ in range(150)]
        reader, anew = SuffixReader(corpus, 0), SuffixReader(corpus, 0)
        reader.extend(kept + [random.randrange(4) for _ in range(num)])
        reader.continuation(expand, 8)
        reader.forget(num)
        anew.extend(kept)
        assert reader.continuation(expand, 8) == anew.continuation(expand, 8)
        for each in (reader, anew):
            each.extend(kept[:30])
        assert reader.continuation(expand, 8) == anew.continuation(expand, 8)


def test_the_likeliest_child_is_the_first_of_the_likeliest_children() -> None:
    """Also of states with more children than are considered."""
    random = Random(2)
    text = [x for _ in range(900) for x in (0, random.choice([random.randrange(400), 7]))]
    index = SuffixIndex()
    index.extend(text)
    assert len(list(index.children(state_of(index, [0])))) > MAX_CHILDREN
    for state in range(len(index.length)):
        assert [index.likeliest_child(state)] == (index.likeliest_children(state, 1) or [0])


def test_memory_of_the_automaton() -> None:
    """Bytes per token, with and without repetition."""
    random = Random(1)
    for num_tokens in (3, 200, 50_000):
        index = SuffixIndex()
        index.extend([random.randrange(num_tokens) for _ in range(8000)])
        assert index.num_bytes < 100 * 8000


# ------------------------------------------------------------------------------------ the drafts


def brute_force(text: Sequence[int], shape: Shape, factor: float, min_prob: float, most: int):
    """The most probable continuations of the longest match, from counts over the whole sequence: a
    list of (probability, path), best first. Ties are in any order."""
    matched = max(
        n for n in range(len(text)) if not n or len(places(text, text[len(text) - n :])) > 1
    )
    string = tuple(text[len(text) - matched :]) if matched else ()

    def continuations(path: tuple[int, ...]) -> list[tuple[float, int]]:
        ends = [end for end in places(text, string + path) if end < len(text)]
        following = Counter(text[end] for end in ends)
        latest = {text[end]: end for end in ends}
        ranked = sorted(following, key=lambda x: (-following[x], -latest[x]))
        ranked = ranked[: 1 if shape == "chain" else 4]
        return [(following[x] / len(ends), x) for x in ranked]

    left = int(factor * matched)
    waiting: list[tuple[float, tuple[int, ...]]] = [(1.0, ())]
    taken: list[tuple[float, tuple[int, ...]]] = []
    while waiting and len(taken) <= left:
        D, path = max(waiting, key=lambda node: node[0])
        waiting.remove((D, path))
        taken.append((D, path))
        if len(path) < most:
            waiting += [(D * P, (*path, x)) for P, x in continuations(path) if min_prob <= D * P]
    return taken[1:]


def paths(tree: Tree) -> list[tuple[int, ...]]:
    """Tokens from the root down to each node."""
    found: list[tuple[int, ...]] = [()]
    for token, parent in zip(tree.tokens, tree.parents, strict=True):
        found.append((*found[parent], token))
    return found[1:]


@pytest.mark.parametrize("min_prob", [0.0, 0.3])
def test_chains_are_those_of_exhaustive_counts(min_prob: float) -> None:
    for text in texts(150):
        index = SuffixIndex()
        index.extend(text)
        state = max(index.link[index.last], 0)
        for factor in (0.5, 1.0, 3.0):
            expand = Expand("chain", factor, min_prob)
            score, tree = expand(index, state, index.length[state], 6)
            expected = brute_force(text, "chain", factor, min_prob, 6)
            assert paths(tree) == [path for _, path in expected]
            assert score == pytest.approx(sum(D for D, _ in expected))


def test_trees_are_those_of_exhaustive_counts() -> None:
    """Equal scores; every node has the path that the counts give, likelier siblings first."""
    for text in texts(150):
        index = SuffixIndex()
        index.extend(text)
        state = max(index.link[index.last], 0)
        score, tree = Expand("tree", 2.0, 0.05)(index, state, index.length[state], 5)
        expected = brute_force(text, "tree", 2.0, 0.05, 5)[:16]
        assert score == pytest.approx(sum(D for D, _ in expected))
        assert len(set(paths(tree))) == len(tree.tokens) <= 16
        assert tree.depths == [0, *map(len, paths(tree))]
        assert max(tree.depths) <= 5


def test_the_corpus_drafts_where_its_score_is_larger() -> None:
    drafter = SuffixDecoding()
    drafter.corpus.add([5, 1, 2, 3, 4])
    context = Context.start([[9, 1, 2], [2, 9, 9, 2]], SoftmaxDistribution(), [0, 0], [0, 1])
    draft = drafter.propose(drafter.start(context), context, Budget(8), context.rng)
    assert draft.tokens_BN[0].tolist()[:3] == [2, 3, 4]
    assert draft.num_drafted_B.tolist()[0] == 2  # nothing is drafted across the end of a text
    assert draft.tokens_BN[1].tolist()[1] in (9, 3)


def test_forgotten_outputs_are_not_drafted() -> None:
    drafter = SuffixDecoding()
    assert isinstance(drafter, RemembersOutputs)
    drafter.corpus.add([5, 1, 2, 3, 4])
    drafter.forget_outputs()
    context = Context.start([[9, 1, 2]], SoftmaxDistribution(), [0], [0])
    draft = drafter.propose(drafter.start(context), context, Budget(8), context.rng)
    assert draft.num_drafted_B.tolist() == [0]
    assert drafter.corpus.num_tokens == 0


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_skipped_matches_could_not_have_won(shape: Shape) -> None:
    """Parity with the plain version: the first of the best among the drafts of all automata."""
    random, expand = Random(4), Expand(shape, 1.5, 0.1)
    for text in texts(120):
        corpus = Corpus(120)
        for _ in range(6):
            corpus.add([random.randrange(3) for _ in range(25)])
        reader = SuffixReader(corpus, 0)
        reader.extend(text)
        index, most = reader.index, random.randint(1, 8)
        state = max(index.link[index.last], 0)
        offers = [expand(index, state, index.length[state], most)]
        for cursor in corpus.cursors([], text):
            offers.append(expand(cursor.index, cursor.state(), cursor.matched, most))
        best = max(offers, key=lambda offer: offer[0])
        assert paths(reader.continuation(expand, most)) == paths(best[1])


def test_memory_of_the_corpus_is_bounded_and_the_newest_stays() -> None:
    corpus, random = Corpus(1000), Random(0)
    known: list[Cursor] = []
    for round_ in range(60):
        text = [random.randrange(50) for _ in range(random.choice([0, 3, 90, 700]))]
        corpus.add(text)
        assert corpus.num_tokens <= 1000
        known = corpus.cursors(known, text)
        assert [cursor.index for cursor in known] == corpus.indices
        if text:
            assert corpus.cursors([], text)[0].matched >= min(len(text), 32), round_
    assert len(corpus.indices) == 2
    none = Corpus(0)
    none.add([1, 2, 3])
    assert none.cursors([], [1]) == []


# ---------------------------------------------------------------------------------- the drafter


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_contract(shape: Shape) -> None:
    """Without a corpus, which changes as rows leave."""
    prompts = [REPETITIVE, (1,), (2, 2, 2, 2), (0, 1, 2, 3, 0, 1, 3, 0, 1)]
    drafter = SuffixDecoding(shape, min_prob=0.0, corpus_tokens=0)
    check_drafter(drafter, 4, prompts=prompts)


@pytest.mark.parametrize(
    ("verifier", "shape"),
    [(Rejection(), "chain"), (Rejection(), "tree"), (Block(), "chain")],
    ids=["rejection", "rejection of trees", "block"],
)
@pytest.mark.parametrize("prompt", [REPETITIVE, (0, 1, 0, 2, 0)])
def test_a_round_has_exactly_the_targets_distribution(
    verifier: Rejection | Block, shape: Shape, prompt: tuple[int, ...]
) -> None:
    """ENUM, with a corpus."""
    drafter = SuffixDecoding(shape, min_prob=0.0)
    drafter.corpus.add([1, 0, 2, 1, 2, 2])
    done = enumerate_round(ToyModel.random(3, seed=1), drafter, verifier, 3, prompt=prompt)
    assert done.total_variation < 1e-12
    assert done.acceptance_length > 1


@pytest.mark.parametrize("shape", ["chain", "tree"])
def test_a_round_at_temperature_zero(shape: Shape) -> None:
    target, drafter = ToyModel.random(3, seed=1), SuffixDecoding(shape)
    done = enumerate_round(
        target, drafter, Greedy(), 3, prompt=REPETITIVE, distribution=greedy_distribution
    )
    assert done.total_variation < 1e-12


@pytest.mark.parametrize("shape", ["chain", "tree"])
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2"])
def test_greedy_output_is_that_of_plain_decoding(family: str, shape: Shape) -> None:
    """Rows of all lengths join and leave; in the second run the corpus holds all outputs."""
    target = tiny(family, std=0.12)
    prompts = [[5, 6, 7, 8, 5, 6], [1], *ragged_prompts([17, 3, 9])]
    sampling = [greedy(n) for n in (30, 22, 7, 40, 28)]
    plain = engine_of(target).generate(prompts, sampling)
    engine = engine_of(
        target, None, "suffix", 6, max_batch_size=3, options={"shape": shape, "factor": 4.0}
    )
    first, second = (engine.generate(prompts, sampling) for _ in range(2))
    assert token_ids(first) == token_ids(second) == token_ids(plain)
    assert second.stats.rounds < first.stats.rounds < plain.stats.rounds


def test_earlier_outputs_change_no_output_at_any_temperature() -> None:
    """Under ``Coupled`` the output is that of plain decoding; the corpus only makes it faster."""
    target = tiny("llama", dtype=torch.float64)
    engine = engine_of(target, None, "suffix", 6, options={"factor": 4.0})
    sampling = Sampling(temperature=1.0, max_new_tokens=40, ignore_eos=True)
    prompts = ragged_prompts([5, 2])
    plain = engine_of(target).generate(prompts, sampling)
    first, second = (engine.generate(prompts, sampling) for _ in range(2))
    assert token_ids(first) == token_ids(second) == token_ids(plain)
    assert second.stats.acceptance_length > 2.5 > first.stats.acceptance_length


def test_the_whole_output_of_a_last_row_reaches_the_corpus() -> None:
    target = tiny("llama")
    engine = engine_of(target, None, "suffix", 4)
    result = engine.generate([[1, 2, 3]], greedy(30))[0]
    (index,) = engine.drafter.corpus.indices  # type: ignore[attr-defined]
    assert tuple(index.tokens) == (*result.token_ids, SEPARATOR)


def test_the_rows_own_budgets_are_kept() -> None:
    context = Context.start([REPETITIVE] * 3, SoftmaxDistribution(), [0] * 3, range(3))
    drafter = SuffixDecoding("tree", min_prob=0.0, factor=8.0)
    budget = Budget(3, torch.tensor([2, 0, 3]))
    draft = drafter.propose(drafter.start(context), context, budget, context.rng)
    assert draft.depth_BN.where(draft.mask_BN, 0).amax(1).tolist() == [2, 0, 3]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"shape": "bush"}, "shape='bush'"),
        ({"factor": 0.0}, "factor=0.0"),
        ({"factor": float("nan")}, "factor=nan"),
        ({"min_prob": 1.5}, "min_prob=1.5"),
        ({"corpus_tokens": -1}, "corpus_tokens=-1"),
    ],
)
def test_parameters_outside_their_domain(arguments: dict, named: str) -> None:
    with pytest.raises(InvalidParameterError, match=named):
        SuffixDecoding(**arguments)

"""Prompt lookup: against a brute-force search, its contract, and its outputs."""

from collections.abc import Sequence
from random import Random

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Sampling
from outrider.core import Budget, Context, Lengths
from outrider.core.errors import InvalidParameterError
from outrider.drafters.lookup.host import HostState
from outrider.drafters.lookup.prompt_lookup import LookupReader, Match, PromptLookup
from outrider.testing import (
    SoftmaxDistribution,
    ToyModel,
    check_drafter,
    enumerate_round,
    greedy_distribution,
)
from outrider.verifiers import Block, Greedy, Rejection

REPETITIVE = (0, 1, 2, 0, 1, 0, 1, 2, 0, 1)


def brute_force(
    text: Sequence[int], longest: int, shortest: int, match: Match, tail: int, most: int
) -> list[int]:
    """A scan of all earlier positions of every suffix, longest suffix first."""
    text = list(text)
    for n in range(longest, shortest - 1, -1):
        places = [
            end
            for end in range(n, len(text) - tail + 1)
            if n <= len(text) and text[end - n : end] == text[-n:]
        ]
        if places:
            place = places[-1] if match == "latest" else places[0]
            return text[place : place + most]
    return []


@pytest.mark.parametrize("match", ["latest", "first"])
@pytest.mark.parametrize("tail", [1, 4])
def test_drafts_are_those_of_an_exhaustive_search(match: Match, tail: int) -> None:
    """Property: sequences of few tokens, read in pieces of any size; also after the tables grew."""
    random = Random(0)
    for trial in range(60):
        shortest = random.randint(1, 3)
        longest = shortest + random.randint(0, 3)
        num_tokens = random.choice([2, 3, 40])
        reader = LookupReader(range(longest, shortest - 1, -1), match == "latest", tail)
        text: list[int] = []
        for _ in range(40 if trial % 10 else 150):
            piece = [random.randrange(num_tokens) for _ in range(random.randint(0, 6))]
            reader.extend(piece)
            text += piece
            most = random.randint(0, 7)
            expected = brute_force(text, longest, shortest, match, tail, most)
            assert list(reader.continuation(most)) == expected


@pytest.mark.parametrize("match", ["latest", "first"])
@pytest.mark.parametrize("tail", [1, 4])
def test_forgotten_tokens_leave_no_trace(match: Match, tail: int) -> None:
    """Property: pieces are read and forgotten in any order, also more than the log holds and after
    the tables grew; drafts are those of an exhaustive search over the remaining tokens."""
    random = Random(1)
    for num_tokens in (2, 40):
        reader = LookupReader(range(3, 0, -1), match == "latest", tail)
        text: list[int] = []
        for round_ in range(250):
            piece = [random.randrange(num_tokens) for _ in range(random.randint(0, 9))]
            reader.extend(piece)
            text += piece
            num = random.randint(0, min(len(text), 90 if round_ % 50 == 49 else 8))
            reader.forget(num)
            text = text[: len(text) - num]
            expected = brute_force(text, 3, 1, match, tail, 5)
            assert list(reader.continuation(5)) == expected


@pytest.mark.parametrize("match", ["latest", "first"])
def test_contract(match: Match) -> None:
    prompts = [REPETITIVE, (1,), (2, 2, 2, 2), (0, 1, 2, 3, 0)]
    check_drafter(PromptLookup(match=match), 4, prompts=prompts)


@pytest.mark.parametrize("verifier", [Rejection(), Block()], ids=["rejection", "block"])
@pytest.mark.parametrize("prompt", [REPETITIVE, (0, 1, 1), (2,)])
def test_a_round_has_exactly_the_targets_distribution(
    verifier: Rejection | Block, prompt: tuple[int, ...]
) -> None:
    """ENUM; the second prompt has a truncated continuation, the third none."""
    done = enumerate_round(ToyModel.random(3, seed=1), PromptLookup(), verifier, 3, prompt=prompt)
    assert done.total_variation < 1e-12


def test_a_round_at_temperature_zero() -> None:
    done = enumerate_round(
        ToyModel.random(3, seed=1),
        PromptLookup(),
        Greedy(),
        3,
        prompt=REPETITIVE,
        distribution=greedy_distribution,
    )
    assert done.total_variation < 1e-12


def test_keeping_a_rejected_copy_in_p_would_show() -> None:
    """The mutant that ENUM must reject: after x was rejected, the next token is drawn from p."""

    class KeepsTheRejected(Rejection):
        def reject(self, p_V, q_V, x):  # type: ignore[no-untyped-def]
            return p_V, None

    done = enumerate_round(
        ToyModel.random(3, seed=1), PromptLookup(), KeepsTheRejected(), 2, prompt=REPETITIVE
    )
    assert done.total_variation > 1e-3


def test_a_rollback_that_keeps_the_tokens_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant that the contract must reject: forgotten tokens are read a second time."""

    def wrong(self: HostState, lengths: Lengths) -> None:
        self.read = list(lengths.host)

    monkeypatch.setattr(HostState, "rollback", wrong)
    with pytest.raises(AssertionError, match="a rollback, and reading the tokens again"):
        check_drafter(PromptLookup(), 4, prompts=[REPETITIVE, (0, 1, 2, 3, 0, 1, 3, 0, 1)])


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mixtral"])
def test_greedy_output_is_that_of_plain_decoding(family: str) -> None:
    """Rows of all lengths join and leave; small weights make outputs that repeat themselves."""
    target = tiny(family, std=0.12)
    prompts = [[5, 6, 7, 8, 5, 6], [1], *ragged_prompts([17, 3, 9])]
    sampling = [greedy(n) for n in (30, 22, 7, 40, 28)]
    plain = engine_of(target).generate(prompts, sampling)
    found = engine_of(target, None, "prompt-lookup", 6, max_batch_size=3).generate(
        prompts, sampling
    )
    assert token_ids(found) == token_ids(plain)
    assert found.stats.accepted > 10


def test_a_row_that_repeats_itself_is_copied() -> None:
    """Every token of a forced loop is accepted after the first repetition."""
    target = tiny("llama")
    loop = [3, 1, 4, 1, 5, 9]

    def forced(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        token = loop[input_ids.shape[1] % len(loop)]
        return torch.full_like(scores, -torch.inf).index_fill_(1, torch.tensor([token]), 0.0)

    sampling = Sampling(max_new_tokens=60, ignore_eos=True, processors=[forced])
    stats = engine_of(target, None, "prompt-lookup", 6).generate([loop], sampling).stats
    assert stats.acceptance_rate == 1
    assert stats.rounds <= 13


def test_the_rows_own_budgets_are_kept() -> None:
    context = Context.start(
        [REPETITIVE, (0, 0, 0), (1, 2)], SoftmaxDistribution(), [0] * 3, range(3)
    )
    drafter = PromptLookup()
    budget = Budget(3, torch.tensor([2, 0, 3]))
    draft = drafter.propose(drafter.start(context), context, budget, context.rng)
    assert draft.num_drafted_B.tolist() == [2, 0, 0]
    assert draft.is_chain


def test_memory_of_the_index() -> None:
    """Bytes per token when hardly any n-gram repeats."""
    reader = LookupReader(range(3, 0, -1), True, 1)
    reader.extend([Random(1).randrange(50_000) for _ in range(8000)])
    assert reader.num_bytes < 100 * 8000


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ({"shortest": 0}, "prompt_lookup_min=0"),
        ({"longest": 1, "shortest": 2}, "prompt_lookup_max=1: must be at least prompt_lookup_min"),
        ({"match": "middle"}, "match='middle'"),
        ({"tail": 0}, "tail=0"),
    ],
)
def test_parameters_outside_their_domain(arguments: dict, named: str) -> None:
    with pytest.raises(InvalidParameterError, match=named):
        PromptLookup(**arguments)

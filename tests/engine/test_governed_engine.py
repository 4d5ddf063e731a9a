"""Engines with ``num_speculative_tokens="auto"``: the same outputs, statistics that explain the
choices, and draft models that rest."""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from tiny_heads import RANDOM_HEADS, target_of, tiny_head
from tiny_models import (
    VOCAB,
    engine_of,
    greedy,
    ragged_prompts,
    tiny,
    tiny_module,
    token_ids,
)
from tiny_recurrent import tiny_recurrent
from tiny_servers import tiny_target

from outrider import Sampling, Speculation, load
from outrider.core import Budget, Context, Lengths
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters import ModelDrafter
from outrider.engine.governor.batch_governor import BatchGovernor
from outrider.engine.governor.outcomes import Asked
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.verifiers import Rejection

TARGET = tiny(dtype=torch.float64, std=0.2)
DRAFT = tiny(dtype=torch.float64, seed=1, std=0.2)
PROMPTS = ragged_prompts([5, 1, 9, 3, 6])
AUTO: Any = "auto"


@pytest.fixture
def lengths(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Draft lengths that governors ask for, instead of their own choices: 0 to 6 in turn, with
    long stretches of 0."""
    asked: list[int] = []

    def ask(
        self: BatchGovernor, rows: Any, limits: Sequence[int], is_greedy: bool, reviewable: int
    ) -> Asked:
        number = len(asked)
        length = min(0 if number % 30 >= 7 else number % 7, max(limits))
        asked.append(length)
        return Asked(0, length, [min(length, limit) for limit in limits])

    monkeypatch.setattr(BatchGovernor, "ask", ask)
    return asked


@pytest.mark.parametrize(
    "method", ["speculative", "block", "prompt-lookup", "suffix", "top-k-tree"]
)
def test_greedy_output_equals_plain_decoding(method: str) -> None:
    """Whatever the clock says."""
    plain = token_ids(engine_of(TARGET).generate(PROMPTS, greedy(40)))
    draft = None if method in ("prompt-lookup", "suffix") else DRAFT
    engine = engine_of(TARGET, draft, method, AUTO)
    for _ in range(2):
        assert token_ids(engine.generate(PROMPTS, greedy(40))) == plain


@pytest.mark.parametrize("method", ["speculative", "prompt-lookup", "hybrid"])
def test_any_sequence_of_lengths_leaves_greedy_output_alone(
    method: str, lengths: list[int]
) -> None:
    plain = token_ids(engine_of(TARGET).generate(PROMPTS, greedy(70)))
    draft = None if method == "prompt-lookup" else DRAFT
    assert token_ids(engine_of(TARGET, draft, method, AUTO).generate(PROMPTS, greedy(70))) == plain
    assert {0, 1, 5} < set(lengths)


def test_the_coupled_method_gives_plain_output_at_any_temperature(lengths: list[int]) -> None:
    """Its noise is keyed by position, so that no draft length changes the output of a seed."""
    sampling = Sampling(temperature=0.9, max_new_tokens=50, ignore_eos=True, seed=3)
    plain = token_ids(engine_of(TARGET).generate(PROMPTS, sampling))
    assert token_ids(engine_of(TARGET, DRAFT, "coupled", AUTO).generate(PROMPTS, sampling)) == plain
    assert set(lengths) > {0, 3}


def test_a_seed_has_one_output_where_outputs_must_be_repeatable() -> None:
    """Sampled rows that have a seed draft as many tokens as without a governor, whoever is in the
    batch; greedy rows may draft fewer."""
    sampled = Sampling(temperature=0.9, max_new_tokens=30, ignore_eos=True, seed=3)
    fixed = engine_of(TARGET, DRAFT, "speculative", 5)
    governed = engine_of(TARGET, DRAFT, "speculative", "auto-repeatable")  # type: ignore[arg-type]
    assert governed.length_policy == "auto-repeatable"
    wanted = token_ids(fixed.generate(PROMPTS, sampled))
    for _ in range(2):
        found = governed.generate(PROMPTS, sampled)
        assert token_ids(found) == wanted
        assert set(found.stats.draft_lengths[6:]) <= {0}
        assert found.stats.probes == 0
        plain = governed.generate(PROMPTS, greedy(40))
        assert token_ids(plain) == token_ids(engine_of(TARGET).generate(PROMPTS, greedy(40)))
    assert plain.stats.believed_rounds > 0
    mixed = governed.generate([PROMPTS[0], PROMPTS[1]], [greedy(30), sampled])
    assert list(mixed[1].token_ids) == list(fixed.generate(PROMPTS[1:2], sampled)[0].token_ids)


def test_samples_without_a_seed_are_governed() -> None:
    """Each has random numbers of its own; one row with a seed in the batch fixes the length of all
    rows."""
    free = Sampling(temperature=0.9, max_new_tokens=30, ignore_eos=True, seed=None)
    engine = engine_of(TARGET, DRAFT, "speculative", "auto-repeatable")  # type: ignore[arg-type]
    found = [engine.generate(PROMPTS, free) for _ in range(2)]
    assert found[1].stats.believed_rounds > 0
    assert token_ids(found[0]) != token_ids(found[1])  # equal with probability 1e-100
    assert engine.request(PROMPTS[0], free).seed != engine.request(PROMPTS[0], free).seed
    sampled = replace(free, seed=3)
    alone = engine_of(TARGET, DRAFT, "speculative", 5).generate(PROMPTS[1:2], sampled)
    mixed = engine.generate(PROMPTS[:2], [free, sampled])
    assert list(mixed[1].token_ids) == list(alone[0].token_ids)


def test_what_is_governed_unasked() -> None:
    """Lossless chains, whose outputs have one distribution whatever their lengths are, unless the
    user sets a length, a rule that ends drafts, or a verification rule."""
    models = tiny_module(), tiny_module(seed=1)

    def policy(*arguments: Any, **settings: Any) -> str | None:
        return load(*models, *arguments, device="cpu", **settings).length_policy

    assert policy() == policy("block") == policy("auto") == "auto-repeatable"
    assert policy("mentored") is None  # lossy
    assert policy("specinfer") is None  # a tree
    assert policy("plain") is None
    for fixed in (3, "fixed"):
        assert policy(num_speculative_tokens=fixed) is None
    assert load(*models, num_speculative_tokens="fixed").num_speculative_tokens == 5
    assert policy(num_speculative_tokens=AUTO) == AUTO
    assert policy(draft_confidence=0.4) is None
    assert policy(draft_length="heuristic") is None
    assert policy(verifier=Rejection()) is None


def test_statistics_explain_the_choices() -> None:
    engine = engine_of(TARGET, TARGET, "speculative", AUTO)
    stats = engine.generate(PROMPTS, greedy(60)).stats
    assert sum(stats.draft_lengths) == stats.rounds
    assert stats.believed_rounds < stats.rounds  # nothing was known at first
    assert 1 <= stats.believed_tokens_per_round <= 9
    assert stats.believed_tokens_per_second > 0
    assert stats.as_dict()["probe_share"] == stats.probes / stats.rounds
    assert engine.governor is not None
    assert engine.governor.beliefs(5, greedy=True)["acceptance, draft"][0] > 0.6
    fixed = engine_of(TARGET, DRAFT).generate(PROMPTS, greedy(8)).stats
    assert (fixed.draft_lengths, fixed.probe_share, fixed.believed_tokens) == ([], 0.0, 0.0)


@pytest.mark.parametrize(("method", "tells"), [("speculative", True), ("block", False)])
def test_governors_learn_from_the_probabilities_of_drafts(
    method: str, tells: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that α is computed from, where each token is verified by itself."""
    reached = overlap = 0.0
    learn = BatchGovernor.learn

    def noting(self: BatchGovernor, *arguments: Any, overlaps: Any) -> None:
        nonlocal reached, overlap
        for positions, products in overlaps:
            assert positions[0] in (0, 1)  # 0 where a row drafts nothing
            reached, overlap = reached + sum(positions), overlap + sum(products)
        learn(self, *arguments, overlaps=overlaps)

    monkeypatch.setattr(BatchGovernor, "learn", noting)
    sampling = Sampling(temperature=0.8, max_new_tokens=60, ignore_eos=True, seed=None)
    results = engine_of(TARGET, DRAFT, method, "auto").generate(PROMPTS, sampling)
    assert (reached > 0) == tells
    if tells:
        assert overlap / reached == pytest.approx(results.stats.alpha, abs=1e-6)


def test_rows_may_ask_for_less() -> None:
    engine = engine_of(TARGET, TARGET, "speculative", AUTO)
    own = [Speculation(num_speculative_tokens=n) for n in (0, 1, 8, 2, 3)]
    found = engine.generate(PROMPTS, greedy(40), speculation=own)
    assert token_ids(found) == token_ids(engine_of(TARGET).generate(PROMPTS, greedy(40)))
    for result, each in zip(found, own, strict=True):
        assert len(result.stats.draft_lengths) <= each.num_speculative_tokens + 1  # type: ignore[operator]


def count_passes(model: HFModel, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The widths of a model's forward passes."""
    widths: list[int] = []
    forward = HFModel.forward

    def noting(self: HFModel, batch: Any) -> Any:
        if self.module is model.module:
            widths.append(batch.tokens_BN.shape[1])
        return forward(self, batch)

    monkeypatch.setattr(HFModel, "forward", noting)
    return widths


def test_rounds_without_drafts_cost_the_draft_model_nothing(
    monkeypatch: pytest.MonkeyPatch, lengths: list[int]
) -> None:
    widths = count_passes(DRAFT, monkeypatch)
    engine_of(TARGET, DRAFT, "speculative", AUTO).generate(PROMPTS[:1], greedy(80))
    stretches = "".join("d" if length else "-" for length in lengths).strip("-").split("d")
    long = [len(stretch) for stretch in stretches if len(stretch) > 8]
    assert len(long) > 0
    prompt = 1
    assert len(widths) == prompt + sum(lengths) + len(long)
    assert sorted(widths)[-len(long) :] >= long  # what was missed is read in one pass


@pytest.mark.parametrize("behind", [[1, 1, 1], [40, 3, 1], [100, 100, 90], [9, 30, 20]])
def test_a_draft_model_that_fell_behind_drafts_as_if_it_had_not(behind: list[int]) -> None:
    """Rows that lack different numbers of tokens; the drafts are equal to the last bit but a
    few."""
    prompts = ragged_prompts([110, 115, 108])
    distribution = Warp([greedy(1)] * 3, VOCAB)
    drafter = ModelDrafter(DRAFT, VOCAB)
    drafts = []
    for late in (True, False):
        context = Context.start(prompts, distribution, [0] * 3, range(3))
        with torch.inference_mode():
            state = drafter.start(context)
            if late:
                kept = [n - 1 - m for n, m in zip(context.lengths, behind, strict=True)]
                state.rollback(Lengths.of(kept))
            drafts.append(drafter.propose(state, context, Budget(4), context.rng))
            assert state.cache.lengths == [n + 3 for n in context.lengths]
    assert drafts[0].tokens_BN.tolist() == drafts[1].tokens_BN.tolist()


@pytest.mark.parametrize("behind", [[1, 25], [1, 8], [3, 29], [59, 29]])
def test_catching_up_takes_no_slots_but_those_of_a_draft(behind: list[int]) -> None:
    """``max_memory`` reserves no others: the longest row has 60 tokens, and 64 slots."""
    context = Context.start(ragged_prompts([60, 30]), Warp([greedy(1)] * 2, VOCAB), [0] * 2, [0, 1])
    drafter = ModelDrafter(DRAFT, VOCAB)
    with torch.inference_mode():
        state = drafter.start(context)
        kept = [n - m for n, m in zip(context.lengths, behind, strict=True)]
        state.rollback(Lengths.of(kept))
        drafter.propose(state, context, Budget(2), context.rng)
    assert state.cache.lengths == [61, 31]
    assert {keys.shape[2] for keys in state.cache.keys if keys is not None} == {64}


def test_recurrent_draft_models_catch_up_too(lengths: list[int]) -> None:
    """The target itself drafts, so that all is accepted as long as the state is right."""
    target, draft = (tiny_recurrent("falcon_h1", dtype=torch.float64, name=n) for n in "ab")
    results = engine_of(target, draft, "speculative", AUTO).generate(PROMPTS, greedy(70))
    assert "-" * 9 + "d" in "".join("d" if length else "-" for length in lengths)
    assert all(result.stats.accepted == result.stats.drafted > 0 for result in results)


@pytest.mark.parametrize("method", ["speculative", "slem"])
def test_what_was_missed_is_read_in_passes_of_bounded_width(
    method: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also by a draft model with a vocabulary of its own."""
    asked: list[int] = []

    def ask(
        self: BatchGovernor, rows: Any, limits: Sequence[int], is_greedy: bool, reviewable: int
    ) -> Asked:
        asked.append(min(4 if len(asked) >= 150 else 0, max(limits)))
        return Asked(0, asked[-1], [min(asked[-1], limit) for limit in limits])

    monkeypatch.setattr(BatchGovernor, "ask", ask)
    target, draft = (tiny_target(std=std, max_position_embeddings=512) for std in (0.2, 0.19))
    sampling = greedy(180)
    plain = engine_of(target).generate("def f(x):", sampling)
    widths = count_passes(draft, monkeypatch)
    found = engine_of(target, draft, method, AUTO).generate("def f(x):", sampling)
    assert found.token_ids == plain.token_ids
    assert found.stats.accepted > 0
    assert 64 in widths
    assert max(widths) == 64


def test_settings_that_contradict_auto() -> None:
    with pytest.raises(InvalidParameterError, match="'auto', 'auto-repeatable' or 'fixed'"):
        load("/nowhere", num_speculative_tokens="many")  # type: ignore[arg-type]
    for policy in ("heuristic", "table:[[1, 4, 2]]"):
        with pytest.raises(IncompatibleError, match="both choose the draft length"):
            engine_of(TARGET, DRAFT, γ=AUTO, draft_length=policy)
    assert engine_of(TARGET, None, "plain", AUTO).governor is None


def test_a_free_source_may_draft_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds that leave the draft model out do not run it; the output stays."""
    ask = BatchGovernor.ask

    def without_model(self: BatchGovernor, *arguments: Any) -> Asked:
        return replace(ask(self, *arguments), source=1)

    monkeypatch.setattr(BatchGovernor, "ask", without_model)
    widths = count_passes(DRAFT, monkeypatch)
    prompts = [prompt * 4 for prompt in PROMPTS]
    engine = engine_of(TARGET, DRAFT, "hybrid", AUTO)
    found = engine.generate(prompts, greedy(60))
    assert token_ids(found) == token_ids(engine_of(TARGET).generate(prompts, greedy(60)))
    assert len(widths) == 1  # the prompts
    assert engine.governor is not None
    assert set(engine.governor.beliefs(5, True)) > {"acceptance, draft", "acceptance, free sources"}


def test_the_automatic_method_takes_the_sources_at_hand() -> None:
    target, draft = tiny_module(), tiny_module(seed=1)
    both = load(target, draft, "auto", device="cpu")
    alone = load(target, None, "auto", device="cpu")
    assert (both.method.name, alone.method.name) == ("hybrid", "suffix")
    assert both.governor is not None
    assert both.governor.sources.names == ("draft", "free sources")
    assert alone.governor is not None
    assert load(target, draft, "auto", 3, device="cpu").governor is None
    plain = engine_of(both.target).generate(PROMPTS, greedy(30))
    assert token_ids(both.generate(PROMPTS, greedy(30))) == token_ids(plain)


def test_the_automatic_method_takes_copies_beside_a_head() -> None:
    """A governor may leave out the head; other kinds of heads draft alone."""
    target = target_of(dtype=torch.float32)
    engine = load(target.module, tiny_head(target, 17), "auto", device="cpu")
    assert engine.method.name == "eagle3-hybrid"
    assert engine.governor is not None
    assert engine.governor.sources.names == ("draft", "free sources")
    assert not engine.governor.sources.lags
    prompts = [prompt * 3 for prompt in ragged_prompts([9, 4, 12], 23)]
    plain = engine_of(engine.target).generate(prompts, greedy(30))
    assert token_ids(engine.generate(prompts, greedy(30))) == token_ids(plain)
    medusa = load(target.module, RANDOM_HEADS["medusa"](target), "auto", device="cpu")
    assert medusa.method.name == "medusa"

"""A fused draft equals the draft made step by step, and outputs are the same."""

from collections.abc import Container
from dataclasses import replace
from typing import Any

import pytest
import torch
from interpreted_graphs import interpreted, untraced
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Engine, Sampling
from outrider.drafters.chain.fused_model import FusedModelDrafter
from outrider.runtime import HFModel
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.executors.fused_draft import ChainPlan, DraftPlan
from outrider.runtime.kv_cache.cache import KVCache

SAMPLED = Sampling(temperature=1.0, seed=3, max_new_tokens=20, ignore_eos=True)


class Counted(CompiledExecutor):
    """Counts the fused drafts.

    Attributes:
        calls: how many were made.
        lengths: of those that it makes; None makes all.
        made: lengths of those that were made.
    """

    calls = 0
    lengths: Container[int] | None = None

    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self.made: list[int] = []

    def draft(
        self, cache: KVCache, tokens_BN: torch.Tensor, plan: DraftPlan, *numbers: Any
    ) -> list[torch.Tensor] | None:
        assert isinstance(plan, ChainPlan)
        if self.lengths is not None and plan.depth not in self.lengths:
            return None
        self.calls += 1
        self.made.append(plan.depth)
        return super().draft(cache, tokens_BN, plan, *numbers)


def draft_model(seed: int = 1) -> HFModel:
    """Of one layer, since tracing takes time by the layer. Fused drafts of models of two layers are
    traced in ``engine/test_one_model_in_two_roles.py`` and ``train/online/test_swaps.py``."""
    return tiny(seed=seed, num_hidden_layers=1)


def drafting(seed: int = 1, *, traces: bool = True) -> tuple[HFModel, Counted]:
    """A draft model with graphs, traced or called as they are."""
    model = draft_model(seed)
    return model, with_graphs(model, traces=traces)


def with_graphs(model: HFModel, *, traces: bool = True) -> Counted:
    """Gives a draft model graphs."""
    make = interpreted if traces else lambda module, trace: untraced(module)
    model.compiled = graph = Counted(model.module, model.spec, "draft", make)
    return graph


def near_pair() -> tuple[HFModel, HFModel]:
    """A target and a draft model near it, so that drafts are accepted to their ends."""
    target, draft = draft_model(seed=0), draft_model()
    for name, weight in draft.module.named_parameters():
        weight.data = 0.9 * target.module.get_parameter(name).data + 0.1 * weight.data
    return target, draft


@pytest.mark.parametrize(
    "sampling",
    [
        greedy(20),
        SAMPLED,
        Sampling(temperature=0.6, seed=5, max_new_tokens=20, ignore_eos=True),
        replace(SAMPLED, top_p=0.8),
        replace(SAMPLED, top_k=5, min_p=0.05),
    ],
    ids=["greedy", "sampled", "tempered", "top-p", "top-k and min-p"],
)
@pytest.mark.parametrize("batch", [1, 3])
def test_outputs_equal_those_of_step_by_step_drafts(sampling: Sampling, batch: int) -> None:
    """Alone, and in ragged batches whose rows leave."""
    prompts = ragged_prompts([9, 3, 14])
    steps = engine_of(tiny(), draft_model(), γ=3, max_batch_size=batch)
    wanted = steps.generate(prompts, sampling)
    draft, graph = drafting()
    engine = engine_of(tiny(), draft, γ=3, max_batch_size=batch)
    found = engine.generate(prompts, sampling)
    assert token_ids(found) == token_ids(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.origins == other.origins
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
    assert graph.calls > 3
    assert not graph.failed


ADJUSTED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.3},
    {"presence_penalty": 0.4, "frequency_penalty": -0.2, "top_p": 0.9},
    {"logit_bias": {3: 2.0, 5: -torch.inf}, "repetition_penalty": 0.8},
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("settings", ADJUSTED, ids=str)
def test_penalties_and_biases_are_drafted_by_the_same_program(
    settings: dict[str, Any], temperature: float
) -> None:
    """In a ragged batch, also where the output is long enough to repeat itself, and where one of
    the rows has neither and is greedy."""
    sampling = Sampling(
        temperature=temperature, seed=3, max_new_tokens=24, ignore_eos=True, **settings
    )
    prompts, samplings = ragged_prompts([9, 3, 14]), [sampling, sampling, greedy(24)]
    wanted = engine_of(tiny(), draft_model(), γ=3, max_batch_size=3).generate(prompts, samplings)
    draft, graph = drafting()
    found = engine_of(tiny(), draft, γ=3, max_batch_size=3).generate(prompts, samplings)
    assert token_ids(found) == token_ids(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.origins == other.origins
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
    assert graph.calls > 3
    assert set(graph._drafts) == {ChainPlan(3)}


@pytest.mark.parametrize(
    "settings",
    [{"processors": (lambda ids, scores: scores / 2,)}, {"forced": {1: 7}}],
    ids=["processors", "forced"],
)
def test_processors_and_forced_tokens_go_step_by_step(settings: Any) -> None:
    sampling = Sampling(temperature=1.0, seed=3, max_new_tokens=8, ignore_eos=True, **settings)
    draft, graph = drafting()
    prompts = ragged_prompts([9])
    wanted = token_ids(engine_of(tiny(), draft_model(), γ=3).generate(prompts, sampling))
    assert token_ids(engine_of(tiny(), draft, γ=3).generate(prompts, sampling)) == wanted
    assert graph.calls == 0


@pytest.mark.parametrize(
    "settings",
    [
        {"draft_length": "heuristic:2"},
        {"draft_length": "survival:0.9"},
        {"draft_confidence": 0.02},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    "sampling",
    [
        greedy(14),
        replace(SAMPLED, top_p=0.9),
        replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.2),
    ],
    ids=["greedy", "p", "penalties"],
)
def test_drafts_of_varying_lengths_take_one_program_per_token(
    settings: dict[str, Any], sampling: Sampling
) -> None:
    """In a ragged batch; the same tokens as step by step, and as many drafted."""
    prompts = ragged_prompts([9, 4, 14])
    steps = engine_of(tiny(), draft_model(), γ=3, max_batch_size=3, **settings)
    wanted = steps.generate(prompts, sampling)
    draft, graph = drafting()
    found = engine_of(tiny(), draft, γ=3, max_batch_size=3, **settings).generate(prompts, sampling)
    assert token_ids(found) == token_ids(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.stats.drafted == other.stats.drafted
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
    assert set(graph._drafts) == {ChainPlan(1)}
    assert graph.calls > 3


def governed(
    draft: HFModel, length: int, method: str = "speculative", target: HFModel | None = None
) -> Engine:
    """An engine that may govern its draft lengths, and drafts this one."""
    auto: Any = "auto"
    engine = engine_of(target or tiny(), draft, method, γ=auto, max_batch_size=3)
    assert engine.governor is not None
    engine.governor.sources = replace(engine.governor.sources, fixed_length=length)
    engine.governor.is_suspended = True
    return engine


PUT_TOGETHER = [(1, [1]), (2, [2]), (3, [3]), (4, [3, 1]), (5, [5]), (8, [5, 3])]
PENALISED = replace(SAMPLED, repetition_penalty=1.3, frequency_penalty=0.2, max_new_tokens=30)


@pytest.mark.parametrize(
    ("sampling", "length", "programs"),
    [
        pytest.param(sampling, *each, id=f"{name}-{each[0]}")
        for name, sampling, some in (
            ("greedy", greedy(30), PUT_TOGETHER),
            ("p", replace(SAMPLED, top_p=0.9, max_new_tokens=30), PUT_TOGETHER),
            ("penalties", PENALISED, PUT_TOGETHER[3:]),  # by the programs of sampled drafts
        )
        for each in some
    ],
)
def test_governed_drafts_are_put_together_from_few_programs(
    sampling: Sampling, length: int, programs: list[int]
) -> None:
    """In a ragged batch; the same tokens as step by step. The programs of one and of three tokens
    are traced; those of other lengths differ from them in nothing but that."""
    prompts = ragged_prompts([9, 4, 14])
    target, draft = near_pair()
    wanted = engine_of(target, draft, γ=length, max_batch_size=3).generate(prompts, sampling)
    assert wanted.stats.alpha > 0.4  # the tokens of later programs count
    graph = with_graphs(draft, traces={*programs} <= {1, 3})
    found = governed(draft, length, target=target).generate(prompts, sampling)
    assert token_ids(found) == token_ids(wanted)
    for one, other in zip(found, wanted, strict=True):
        assert one.stats.drafted == other.stats.drafted
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
    assert "".join(map(str, graph.made)).startswith(3 * "".join(map(str, programs)))


def test_a_draft_whose_program_is_missing_is_put_together_from_shorter_ones() -> None:
    draft, graph = drafting(traces=False)
    graph.lengths = {1, 2}
    wanted = engine_of(tiny(), draft_model(), γ=5).generate(ragged_prompts([9]), greedy(20))
    found = governed(draft, 5).generate(ragged_prompts([9]), greedy(20))
    assert token_ids(found) == token_ids(wanted)
    assert graph.made[:6] == [2, 2, 1] * 2


def test_a_last_draft_that_is_shorter_goes_step_by_step() -> None:
    draft, graph = drafting()
    engine_of(tiny(), draft, γ=3).generate(ragged_prompts([9]), greedy(3))
    assert graph.calls == 0  # two tokens at most, where programs draft three


def test_distributions_are_those_that_the_tokens_were_drawn_from() -> None:
    """And the last token, which has no children, has a row of its own."""
    draft, _ = drafting()
    engine = engine_of(tiny(), draft, γ=3)
    seen = []
    propose = FusedModelDrafter.propose

    def watched(self: FusedModelDrafter, *arguments: Any) -> Any:
        seen.append(propose(self, *arguments))
        return seen[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedModelDrafter, "propose", watched)
        engine.generate(ragged_prompts([9]), SAMPLED)
    full = [each for each in seen if each.num_nodes == 4]
    assert full
    for each in full:
        assert each.drawn == "iid"
        assert each.probs_BNV is not None
        sums_BN = each.probs_BNV.sum(-1)
        torch.testing.assert_close(sums_BN[:, :-1], torch.ones_like(sums_BN[:, :-1]))
        assert not each.probs_BNV[:, -1].any()
        drawn_BD = each.probs_BNV[:, :-1].gather(2, each.tokens_BN[:, 1:, None])
        assert (drawn_BD > 0).all()


@pytest.mark.parametrize("sampling", [greedy(24), SAMPLED], ids=["greedy", "sampled"])
def test_rows_that_lack_different_numbers_of_tokens_are_drafted_together(
    sampling: Sampling, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row with a fully accepted draft lacks two tokens in the cache, the other row one."""
    mixed = []
    whole = FusedModelDrafter._fused

    def watched(self: FusedModelDrafter, state: Any, context: Any, *rest: Any) -> Any:
        lacking = self._lacking(state, context)
        draft = whole(self, state, context, *rest)
        mixed.append(len(set(lacking)) > 1 and draft is not None)
        return draft

    monkeypatch.setattr(FusedModelDrafter, "_fused", watched)
    prompts = ragged_prompts([9, 4, 14])
    target, draft = near_pair()
    wanted = engine_of(target, draft, γ=1, max_batch_size=3).generate(prompts, sampling)
    assert not mixed
    draft.compiled = CompiledExecutor(draft.module, draft.spec, "draft", interpreted)
    found = engine_of(target, draft, γ=1, max_batch_size=3).generate(prompts, sampling)
    assert token_ids(found) == token_ids(wanted)
    assert sum(mixed) > 1


def test_a_row_too_short_to_be_fed_again_drafts_step_by_step() -> None:
    draft, graph = drafting()
    engine = engine_of(tiny(), draft, γ=3, max_batch_size=2)
    prompts = [[3], [5, 6, 7, 8]]
    wanted = engine_of(tiny(), draft_model(), γ=3, max_batch_size=2).generate(prompts, greedy(12))
    assert token_ids(engine.generate(prompts, greedy(12))) == token_ids(wanted)
    assert graph.calls > 0


def test_rows_with_little_room_left_do_not_prevent_fused_drafts() -> None:
    """Their nodes beyond the room are masked."""
    samplings = [greedy(6), greedy(24)]
    prompts = ragged_prompts([9, 4])
    draft, graph = drafting()
    engine = engine_of(tiny(), draft, γ=3, max_batch_size=2)
    masks = []
    propose = FusedModelDrafter.propose

    def watched(self: FusedModelDrafter, *arguments: Any) -> Any:
        calls, found = graph.calls, propose(self, *arguments)
        if graph.calls > calls:
            masks.append(found.mask_BN.all(1).tolist())
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(FusedModelDrafter, "propose", watched)
        found = engine.generate(prompts, samplings)
    wanted = engine_of(tiny(), draft_model(), γ=3, max_batch_size=2).generate(prompts, samplings)
    assert token_ids(found) == token_ids(wanted)
    assert [False, True] in masks

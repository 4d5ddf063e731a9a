"""Staged drafting: inner rounds have the draft model's distribution, outer rounds the target's,
whatever drafts for the draft model.

Legend: B rows, J random numbers, C boxes, N nodes, V vocabulary, S sequences.
"""

from typing import Any

import pytest
import torch
from real_tokenizers import words
from tiny_models import UniformDrafter, greedy, ragged_prompts, tiny
from torch import Tensor

from outrider import Sampling
from outrider.core import Budget, Context, Draft, Stream, Verdict, Verifier, commit_round, run_round
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters import ModelDrafter
from outrider.drafters.chain.stage import StageDistributions
from outrider.drafters.chain.staged import StagedDrafter
from outrider.drafters.chain.stop import Survival
from outrider.drafters.lookup.prompt_lookup import PromptLookup
from outrider.drafters.lookup.suffix import SuffixDecoding
from outrider.drafters.vocabulary.slem import SlemDrafter
from outrider.drafters.vocabulary.tli import TliDrafter
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.testing import (
    ScriptedContext,
    ToyDrafter,
    ToyModel,
    check_drafter,
    chi2,
    enumerate_round,
    partition,
    softmax_distribution,
    target_distribution,
)
from outrider.testing.script import RecordingStream, ScriptedStream
from outrider.verifiers import Block, Greedy, Lenience, Rejection

PROMPT = (0, 1)


def mini(seed: int, num_tokens: int = 2) -> HFModel:
    """A very small transformer in float64."""
    sizes = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    heads = {"num_attention_heads": 1, "num_key_value_heads": 1}
    settings: dict[str, Any] = {"vocab_size": num_tokens, "std": 0.4} | sizes | heads
    return tiny("llama", seed, dtype=torch.float64, **settings)


def toy(num_tokens: int = 2, **settings: Any) -> ToyDrafter:
    return ToyDrafter(ToyModel.random(num_tokens, seed=2), **settings)


def staged(inner: Any, model: HFModel | None = None, rule: Verifier | None = None) -> StagedDrafter:
    model = model or mini(1)
    return StagedDrafter(model, model.num_tokens, inner, rule or Rejection(), Greedy(), 3)


TARGET = ToyModel.random(2, seed=1)
CHEAP = {
    "draws": staged(toy()),
    "draws, by block": staged(toy(), rule=Block()),
    "tree": staged(toy(width=2)),
    "chosen": staged(toy(drawn="chosen")),
    "two stages": staged(staged(toy(), mini(8))),
}


# ------------------------------------------------------------------------------------ exact
# distributions


def drafts(drafter: StagedDrafter, num_tokens: int) -> tuple[Draft, Tensor]:
    """One draft per box of random numbers, and the volumes of the boxes."""

    def propose(rng: Stream, B: int) -> Draft:
        context = ScriptedContext.repeat(PROMPT, B, softmax_distribution)
        return drafter.propose(drafter.start(context), context, Budget(num_tokens), rng)

    recorder = RecordingStream(torch.arange(64), torch.zeros(64, dtype=torch.int64))
    propose(recorder, 64)
    boxes = partition(
        lambda u_BJ: _index(propose(recorder.script(u_BJ), len(u_BJ)), drafter.model.num_tokens),
        recorder.num_requested,
    )
    return propose(recorder.script(boxes.middle_CJ), len(boxes.volume_C)), boxes.volume_C


def _index(draft: Draft, V: int) -> Tensor:
    """The index of a drafted sequence, whose first token is the most significant digit."""
    place_D = V ** torch.arange(draft.num_nodes - 2, -1, -1)
    return (draft.tokens_BN[:, 1:] * place_D).sum(1)


@torch.inference_mode()
@pytest.mark.parametrize("name", [n for n in CHEAP if n != "two stages"])
def test_drafts_have_the_draft_models_own_distribution(name: str) -> None:
    """ENUM of the inner rounds: the probabilities of all sequences, and the distributions handed
    over with each, against those of the draft model alone."""
    drafter = CHEAP[name]
    num_tokens = 3 if name == "draws" else 2
    draft, volume_C = drafts(drafter, num_tokens)
    probs_S = target_distribution(drafter.model, PROMPT, num_tokens)
    index_C = _index(draft, 2)
    torch.testing.assert_close(torch.bincount(index_C, volume_C), probs_S, rtol=0, atol=1e-12)
    assert draft.probs_BNV is not None
    q_CD = draft.probs_BNV[:, :-1].gather(2, draft.tokens_BN[:, 1:, None])[..., 0]
    torch.testing.assert_close(q_CD.prod(1), probs_S[index_C], rtol=1e-9, atol=0)


@torch.inference_mode()
@pytest.mark.parametrize(
    ("name", "rule"),
    [("draws", Block()), ("tree", Rejection()), ("two stages", Rejection())],
    ids=["verified by block", "tree", "two stages"],
)
def test_a_round_has_exactly_the_targets_distribution(name: str, rule: Verifier) -> None:
    """ENUM of inner and outer rounds. (The test before shows that other cheap drafts give the same
    distribution one level below.)"""
    done = enumerate_round(TARGET, CHEAP[name], rule, 2)
    alone = enumerate_round(TARGET, ModelDrafter(mini(1), 2), rule, 2)
    assert done.total_variation < 1e-12
    assert done.acceptance_length == pytest.approx(alone.acceptance_length, abs=1e-12)


@pytest.mark.slow
@torch.inference_mode()
def test_many_rounds_have_the_targets_distribution() -> None:
    """CHI2: rejected tokens are taken back and replaced. A correct drafter fails with probability
    1e-4 (seed fixed)."""
    drafter = staged(toy())
    assert chi2(TARGET, drafter, Rejection(), 3, length=4, num_rows=20_000) > 1e-4


# --------------------------------------------------------------------------------------- mutants


@torch.inference_mode()
def test_inner_rounds_with_the_outer_rounds_numbers_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MUT: inner rounds use the numbers of the outer verdict."""
    for stream in (RecordingStream, ScriptedStream):
        monkeypatch.setattr(stream, "child", lambda self, number: self)
    assert enumerate_round(TARGET, staged(toy()), Rejection(), 2).total_variation > 1e-3


@torch.inference_mode()
def test_inner_rounds_that_share_their_numbers_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """MUT. (Enumeration cannot follow it: a number of an earlier round decides a later one.)"""
    child = Stream.child
    monkeypatch.setattr(Stream, "child", lambda self, number: child(self, 0))
    with pytest.raises(AssertionError, match="not drawn from the declared probs"):
        check_drafter(staged(toy(6), mini(1, 6)), 6)


@torch.inference_mode()
def test_handing_over_the_cheap_drafts_distribution_would_show(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """MUT."""
    add = StageDistributions.add
    distributions: list[Tensor] = []

    class Noting(ToyDrafter):
        def propose(self, *arguments: Any) -> Draft:
            draft = super().propose(*arguments)
            assert draft.probs_BNV is not None
            distributions[:] = [draft.probs_BNV]
            return draft

    def wrong(self: StageDistributions, p_BNV: Tensor, verdict: Verdict, before_B: Tensor) -> None:
        add(self, distributions[0], verdict, before_B)

    monkeypatch.setattr(StageDistributions, "add", wrong)
    cheap = Noting(ToyModel.random(2, seed=2))
    assert enumerate_round(TARGET, staged(cheap), Rejection(), 2).total_variation > 1e-3


# -------------------------------------------------------------------------------------- contract


@torch.inference_mode()
@pytest.mark.parametrize(
    "inner",
    [toy(6), ModelDrafter(mini(2, 6), 6), PromptLookup(), UniformDrafter(6, 2)],
    ids=["starts anew", "rolls back", "lookup", "tree"],
)
def test_contract(inner: Any) -> None:
    """Ragged budgets, rejected drafts, drafts that were never committed, rows that leave and join.
    False alarms: see ``check_drafter``, below 1e-6."""
    check_drafter(staged(inner, mini(1, 6)), 6)


@torch.inference_mode()
def test_contract_of_two_stages_and_of_a_stage_that_stops() -> None:
    """The same, without counting draws again."""
    two = staged(staged(PromptLookup(), mini(3, 6)), mini(1, 6))
    check_drafter(two, 6, num_samples=0)
    drafter = staged(PromptLookup(), mini(1, 6))
    drafter.stop = Survival(0.6)
    check_drafter(drafter, 6, num_samples=0)


@torch.inference_mode()
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_it_stops_where_the_draft_model_alone_stops(temperature: float) -> None:
    """At temperature 0 by the model's own probabilities, like ``ModelDrafter``."""
    model, stop, B = mini(1, 6), Survival(0.7), 24
    distribution = Warp([Sampling(temperature=temperature)] * B, 6)
    prompts = [[3, i // 6, i % 6] for i in range(B)]
    context = Context.start(prompts, distribution, [0] * B, range(B))
    drafter = StagedDrafter(model, 6, PromptLookup(), Rejection(), Greedy(), stop=stop)
    draft = drafter.propose(drafter.start(context), context, Budget(5), context.rng)
    plain = ModelDrafter(model, 6, stop)
    alone = plain.propose(plain.start(context), context, Budget(5), context.rng)
    assert len(set(draft.num_drafted_B.tolist())) > 1
    if temperature == 0:
        assert draft.num_drafted_B.tolist() == alone.num_drafted_B.tolist()
        assert draft.probs_BNV is None
    else:
        assert draft.probs_BNV is not None
        q_BD = draft.probs_BNV[:, :-1].gather(2, draft.tokens_BN[:, 1:, None])[..., 0]
        going_BD = stop.goes_on(q_BD, q_BD.cumprod(1)).long().cumprod(1)
        assert draft.num_drafted_B.tolist() == (going_BD.sum(1) + 1).clamp(max=5).tolist()


@torch.inference_mode()
@pytest.mark.parametrize("inner", [PromptLookup(), ModelDrafter(mini(0, 6), 6)])
def test_at_temperature_zero_it_is_the_draft_models_argmax(inner: Any) -> None:
    """Token for token over many rounds, some of which accept everything and some nothing."""
    model = mini(1, 6)
    prompts = ragged_prompts([5, 2, 9], 6)
    context = Context.start(prompts, Warp([greedy(9)] * 3, 6), [0] * 3, range(3))
    drafter, plain = staged(inner, model), ModelDrafter(model, 6)
    target = tiny("llama", 1, dtype=torch.float64, vocab_size=6)
    cache, state = target.start(context), drafter.start(context)
    for γ in (4, 0, 3, 5, 1, 6, 2):
        alone = plain.propose(plain.start(context), context, Budget(γ), context.rng)
        parts = context, target, cache, drafter, state
        round_ = run_round(*parts, Greedy(), Budget(γ))
        assert round_.draft.tokens_BN.tolist() == alone.tokens_BN.tolist()
        assert round_.draft.probs_BNV is None
        commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())


@torch.inference_mode()
def test_passes_are_saved_and_none_is_repeated() -> None:
    """With the draft model as its own cheap draft all is accepted: γ tokens cost one pass, also
    after a fully accepted draft, whose last token needs no pass of its own."""
    model, B = mini(1, 6), 2
    passes: list[int] = []
    model.module.register_forward_pre_hook(
        lambda module, inputs, named: passes.append(named["input_ids"].shape[1]), with_kwargs=True
    )
    cheap = ModelDrafter(mini(1, 6), 6)
    drafter = StagedDrafter(model, 6, cheap, Rejection(), Greedy(), 7)
    target = mini(1, 6)
    context = Context.start([[0, 1, 2]] * B, Warp([greedy(9)] * B, 6), [0] * B, range(B))
    cache, state = target.start(context), drafter.start(context)
    passes.clear()
    for _ in range(3):
        parts = context, target, cache, drafter, state
        round_ = run_round(*parts, Greedy(), Budget(4))
        commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())
        assert round_.verdict.num_accepted_B.tolist() == [4, 4]
    assert passes == [4, 5, 5]  # root and three drafted tokens, then also x_γ of the last round


@torch.inference_mode()
@pytest.mark.parametrize("kind", [PromptLookup, SuffixDecoding])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_rolled_back_lookup_drafts_like_a_new_one(kind: type[Any], temperature: float) -> None:
    """Parity in every inner round, while outer rounds accept all, some or none, and rows leave."""
    compared: list[int] = []

    class Twin(kind):  # type: ignore[misc]
        def propose(self, state: Any, *arguments: Any) -> Draft:
            draft = super().propose(state, *arguments)
            anew = super().propose(super().start(arguments[0]), *arguments)
            assert draft.tokens_BN.tolist() == anew.tokens_BN.tolist()
            assert draft.mask_BN.tolist() == anew.mask_BN.tolist()
            compared.append(draft.num_nodes)
            return draft

    drafter = staged(Twin(), mini(1, 6))
    target, sampling = mini(4, 6), Sampling(temperature=temperature)
    prompts = ragged_prompts([5, 2, 9], 6)
    context = Context.start(prompts, Warp([sampling] * 3, 6), [0] * 3, range(3))
    cache, state = target.start(context), drafter.start(context)
    rule = Rejection() if temperature else Greedy()
    inner, kept = state.inner, set[tuple[bool, bool]]()
    for round_, γ in enumerate((4, 0, 3, 5, 1, 6, 2, 4, 4, 4, 7, 3)):
        parts = context, target, cache, drafter, state
        turned = run_round(*parts, rule, Budget(γ))
        accepted = turned.verdict.num_accepted_B.tolist()
        kept |= {(n > 0, n == γ) for n in accepted}
        commit_round(*parts, turned, accepted)
        if round_ == 7:
            for each in (cache, state, context):
                each.keep([2, 0])
            context.distribution = Warp([sampling] * 2, 6)
    assert state.inner is inner
    assert len(compared) > 12
    assert max(compared) > 2
    assert {(False, False), (True, True)} <= kept or not temperature


# ------------------------------------------------------------------------------------- bad input


@torch.inference_mode()
def test_drafters_with_another_vocabulary_are_an_error() -> None:
    model = HFModel(mini(1, 3).module, words(("a", "b", "<unk>")))
    for inner in (TliDrafter(model, model), SlemDrafter(model, model)):
        with pytest.raises(IncompatibleError, match="vocabulary of its own"):
            staged(inner, mini(1, 3))


def test_lossy_inner_rules_are_an_error() -> None:
    model, cheap = mini(1), toy()
    for rules in ((Lenience(0.5), Greedy()), (Rejection(), Lenience(0.5)), (Greedy(), Greedy())):
        with pytest.raises(IncompatibleError, match="draft model's distribution"):
            StagedDrafter(model, 2, cheap, *rules)
    with pytest.raises(IncompatibleError, match="cannot verify 'distinct'"):
        staged(toy(drawn="distinct"))
    with pytest.raises(InvalidParameterError, match="inner_tokens=0"):
        StagedDrafter(model, 2, cheap, Rejection(), Greedy(), 0)

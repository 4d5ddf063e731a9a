"""The model drafter: cache, stopping, vocabulary, and the distribution of verified rounds.

Legend: B rows, N nodes, V vocabulary.
"""

import pytest
import torch
from tiny_models import (
    VOCAB,
    byte_tokenizer,
    engine_of,
    greedy,
    ragged_prompts,
    tiny,
    tiny_module,
    token_ids,
)

from outrider import Sampling
from outrider.core import Budget, Context, Distribution, Draft, Stream
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters import ModelDrafter
from outrider.drafters.chain.model import ModelState
from outrider.drafters.chain.stop import Confidence, Stop, Survival
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.runtime.prefill import Prefilling
from outrider.sampling import Warp
from outrider.testing import check_drafter, chi2, enumerate_round
from outrider.verifiers import Greedy, Rejection

V = 3


def toy(seed: int, num_tokens: int = V) -> HFModel:
    """A real transformer so small that its rounds can be enumerated."""
    return tiny("llama", seed, dtype=torch.float64, vocab_size=num_tokens, std=0.25)


def distribution(num_rows: int) -> Distribution:
    """A distribution with every kind of sampling parameter."""
    sampling = Sampling(temperature=0.8, frequency_penalty=0.3, logit_bias={0: 0.5})
    return Warp([sampling] * num_rows, V)


@pytest.mark.parametrize("stop", [None, Confidence(0.4), Survival(0.7)])
def test_contract(stop: Stop | None) -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    with torch.inference_mode():
        check_drafter(ModelDrafter(toy(1, 6), 6, stop), 6)


@pytest.mark.parametrize("stop", [None, Confidence(0.45), Survival(0.6)])
@pytest.mark.parametrize("verifier", [Rejection(), Greedy()], ids=["rejection", "greedy"])
def test_a_round_has_exactly_the_targets_distribution(
    verifier: Rejection | Greedy, stop: Stop | None
) -> None:
    """ENUM: all drafts and decisions of one round, completed by the target, against the target.
    Greedy verification is exact at temperature 0 only, so it is tested there."""

    def greedy_distribution(num_rows: int) -> Distribution:
        return Warp([Sampling(temperature=0)] * num_rows, V)

    with torch.inference_mode():
        done = enumerate_round(
            toy(0),
            ModelDrafter(toy(1), V, stop),
            verifier,
            2,
            prompt=(0, 1, 2),
            distribution=greedy_distribution if isinstance(verifier, Greedy) else distribution,
        )
    assert done.total_variation < 1e-9


def test_dropping_the_unsure_token_would_show() -> None:
    """The mutant that ENUM must reject: a token of low confidence removed from the draft."""

    class Dropping(ModelDrafter):
        def propose(
            self, state: ModelState, context: Context, budget: Budget, rng: Stream
        ) -> Draft:
            draft = super().propose(state, context, budget, rng)
            assert draft.probs_BNV is not None
            x_BD1 = draft.tokens_BN[:, 1:, None]
            sure_BD = draft.probs_BNV[:, :-1].gather(2, x_BD1)[..., 0] >= 0.45
            sure_BN = torch.nn.functional.pad(sure_BD, (1, 0), value=True)
            mask_BN = draft.mask_BN & (sure_BN.long().cumprod(1) > 0)
            return Draft.chain(draft.tokens_BN, mask_BN, draft.probs_BNV, draft.drawn)

    with torch.inference_mode():
        done = enumerate_round(
            toy(0),
            Dropping(toy(1), V, 0.45),
            Rejection(),
            2,
            prompt=(0, 1, 2),
            distribution=distribution,
        )
    assert done.total_variation > 1e-3


@pytest.mark.slow
def test_many_rounds_with_a_confidence_stop_have_the_targets_distribution() -> None:
    """CHI2 over several rounds; a correct drafter fails with probability 1e-4 (seed fixed)."""
    with torch.inference_mode():
        p = chi2(
            toy(0),
            ModelDrafter(toy(1), V, 0.45),
            Rejection(),
            2,
            length=3,
            num_rows=10_000,
            distribution=distribution,
        )
    assert p > 1e-4


def test_the_last_drawn_token_stays_in_the_draft() -> None:
    """A row stops behind the first token less probable than the threshold, never before it."""
    drafter = ModelDrafter(tiny("llama", 1, std=0.2), VOCAB, Confidence(0.03))
    prompts = ragged_prompts([4] * 64)
    context = Context.start(prompts, Warp([Sampling()] * 64, VOCAB), [0] * 64, range(64))
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, Budget(8), context.rng)
    assert draft.probs_BNV is not None
    lengths = draft.num_drafted_B.tolist()
    assert 1 in lengths
    assert max(lengths) > 2
    for row, length in enumerate(lengths):
        x = draft.tokens_BN[row, 1 : length + 1]
        q = draft.probs_BNV[row, :length].gather(1, x[:, None])[:, 0]
        assert bool((q[:-1] >= 0.03).all())
        assert length == 8 or q[-1] < 0.03


def test_confidence_saves_passes_and_changes_nothing_else() -> None:
    target, draft = tiny(seed=0), tiny(seed=1)
    prompts = ragged_prompts([3, 9, 5])
    plain = engine_of(target).generate(prompts, greedy(20))
    eager = engine_of(target, draft, γ=6).generate(prompts, greedy(20))
    unsure = engine_of(target, draft, γ=6, draft_confidence=0.99).generate(prompts, greedy(20))
    assert token_ids(plain) == token_ids(eager) == token_ids(unsure)
    assert unsure.stats.drafted < eager.stats.drafted / 2


@pytest.mark.parametrize("seed", [0, 1], ids=["all accepted", "few accepted"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_one_pass_per_drafted_token(
    monkeypatch: pytest.MonkeyPatch, seed: int, temperature: float
) -> None:
    """γ tokens cost γ passes of the draft model, also after a full acceptance and in a ragged batch
    whose rows join and leave; only a prompt costs one more."""
    draft = tiny(seed=seed, name="draft")
    passes = 0
    prefills = 0

    def count(module: torch.nn.Module, inputs: object) -> None:
        nonlocal passes
        passes += 1

    draft.module.register_forward_pre_hook(count)
    begin, propose = ModelDrafter.begin, ModelDrafter.propose
    rounds: list[tuple[int, int]] = []

    def beginning(self: ModelDrafter, context: Context) -> Prefilling:
        nonlocal prefills
        prefills += 1
        return begin(self, context)

    def proposing(
        self: ModelDrafter, state: ModelState, context: Context, budget: Budget, rng: Stream
    ) -> Draft:
        before = passes
        done = propose(self, state, context, budget, rng)
        rounds.append((budget.max_tokens, passes - before))
        return done

    monkeypatch.setattr(ModelDrafter, "begin", beginning)
    monkeypatch.setattr(ModelDrafter, "propose", proposing)
    engine = engine_of(tiny(seed=0), draft, γ=4, max_batch_size=3)
    sampling = [
        Sampling(temperature=temperature, max_new_tokens=n, ignore_eos=True)
        for n in (12, 30, 7, 21, 3)
    ]
    results = engine.generate(ragged_prompts([5, 2, 9, 4, 7]), sampling)
    assert len(rounds) >= 8
    assert all(tokens == cost for tokens, cost in rounds)
    assert passes == sum(tokens for tokens, _ in rounds) + prefills
    if seed == 0:
        assert results.stats.acceptance_rate > 0.95


def test_the_cache_holds_what_was_accepted() -> None:
    """After any rounds the state drafts the same as a fresh one."""
    target, drafter = tiny(seed=0), ModelDrafter(tiny(seed=0), VOCAB)
    prompts = ragged_prompts([5, 11])
    context = Context.start(prompts, Warp([greedy(9)] * 2, VOCAB), [0, 0], [0, 1])
    with torch.inference_mode():
        cache, state = target.start(context), drafter.start(context)
        for γ in (3, 0, 1, 5, 0, 0, 2):
            budget = Budget(γ)
            draft = drafter.propose(state, context, budget, context.rng)
            fresh = drafter.propose(drafter.start(context), context, budget, context.rng)
            assert torch.equal(draft.tokens_BN, fresh.tokens_BN)
            scores = target.score(cache, draft)
            verdict = Greedy()(draft, scores.logits_BNV, context.rng).read()
            target.commit(cache, draft, verdict)
            drafter.commit(state, draft, verdict, scores)
            context.append(verdict.emitted(draft), verdict.num_emitted)
    assert context.lengths[0] > 5 + 10


def _padded(module_tokens: int, used: int, seed: int) -> HFModel:
    """A model with logits wider than the vocabulary, of which the padding has large ones."""
    module = tiny_module("llama", seed, vocab_size=module_tokens)
    with torch.no_grad():
        module.lm_head.weight[used:] *= 5
    return HFModel(module, byte_tokenizer(num_tokens=used))


@pytest.mark.parametrize(("target_width", "draft_width"), [(270, 333), (333, 270), (270, 270)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_padded_vocabularies(target_width: int, draft_width: int, temperature: float) -> None:
    """The draft never proposes a token the target has no logit for, and greedy output is equal."""
    target, draft = _padded(target_width, 270, 0), _padded(draft_width, 270, 1)
    sampling = Sampling(temperature=temperature, max_new_tokens=20, ignore_eos=True)
    prompts = ragged_prompts([4, 7], 270)
    results = engine_of(target, draft, γ=5).generate(prompts, sampling)
    assert all(token < target_width for ids in token_ids(results) for token in ids)
    if temperature == 0:
        assert token_ids(results) == token_ids(engine_of(target).generate(prompts, sampling))
    context = Context.start(prompts, Warp([sampling] * 2, target_width), [0, 0], [0, 1])
    drafter = ModelDrafter(draft, target_width)
    with torch.inference_mode():
        drawn = drafter.propose(drafter.start(context), context, Budget(5), context.rng)
    assert int(drawn.tokens_BN.max()) < min(target_width, draft_width)
    if drawn.probs_BNV is not None:
        assert drawn.probs_BNV.shape[2] == target_width
        torch.testing.assert_close(drawn.probs_BNV[:, :-1].sum(2), torch.ones(2, 5))


@pytest.mark.parametrize("confidence", [-0.1, 1.5, float("nan")])
def test_confidence_outside_its_range(confidence: float) -> None:
    with pytest.raises(InvalidParameterError, match="draft_confidence="):
        ModelDrafter(tiny(), VOCAB, confidence)


def test_a_draft_model_is_needed() -> None:
    with pytest.raises(IncompatibleError, match="'speculative' needs a draft model"):
        engine_of(tiny(), None, METHODS["speculative"])

"""Token-level intersection: its distribution, the draft's cache, and equality with speculative
decoding.

Legend: B rows, N nodes, V the target's vocabulary.
"""

from itertools import product

import pytest
import torch
from real_tokenizers import KINDS, model, tokenizer, words
from tiny_models import engine_of, full_logits, greedy, ragged_prompts, tiny_module, token_ids
from torch import Tensor
from transformers import PreTrainedModel

from outrider import Engine, Sampling
from outrider.core import Budget, Context, Distribution, Prefix
from outrider.core.errors import InvalidParameterError, VocabularyMismatchError
from outrider.drafters import ModelDrafter
from outrider.drafters.vocabulary.follow import FollowState
from outrider.drafters.vocabulary.tli import TliDrafter
from outrider.methods.vocabularies import VOCABULARIES
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.testing import check_drafter, chi2, enumerate_round
from outrider.verifiers import Block, Rejection

TLI = VOCABULARIES[0]
PROMPTS = ["The quick brown", "x", "    return déjà vu, 東京"]
SAMPLING = Sampling(
    temperature=0.9, top_k=30, top_p=0.95, frequency_penalty=0.3, max_new_tokens=14, ignore_eos=True
)


def toy(seed: int, *names: str, std: float = 0.25) -> HFModel:
    """A real transformer so small that its rounds can be enumerated, with a word per token."""
    module = tiny_module(
        "llama", seed, torch.float64, std, vocab_size=len(names), num_hidden_layers=1
    )
    return HFModel(module, words(names))


def pair() -> tuple[HFModel, HFModel]:
    """Two of three words in common, under other ids; the target's 0 is its own."""
    return toy(0, "a", "b", "<unk>"), toy(1, "b", "<unk>", "d")


def distribution(num_rows: int) -> Distribution:
    """A distribution with every kind of sampling parameter."""
    sampling = Sampling(temperature=0.8, top_k=2, frequency_penalty=0.3, logit_bias={0: 0.5})
    return Warp([sampling] * num_rows, 3)


def shuffled(module: PreTrainedModel, order: Tensor) -> PreTrainedModel:
    """The same model with its tokens in another order: token i is what ``order[i]`` was."""
    copy = tiny_module("llama", vocab_size=len(order)).to(torch.float64)
    copy.load_state_dict(module.state_dict())
    with torch.no_grad():
        for layer in (copy.get_input_embeddings(), copy.get_output_embeddings()):
            layer.weight.copy_(layer.weight[order])
    return copy


@pytest.mark.parametrize("confidence", [0.0, 0.3])
def test_contract(confidence: float) -> None:
    """False alarms: see ``check_drafter``, below 1e-6. Some of the ragged rows that join and leave
    end in a word that the draft lacks."""
    target = toy(0, "a", "b", "c", "<unk>", "e", "f")
    draft = toy(1, "f", "<unk>", "d", "a", "e", "b", "g")
    with torch.inference_mode():
        check_drafter(TliDrafter(target, draft, confidence), 6, num_samples=1024)


@pytest.mark.parametrize(
    ("verifier", "confidence"),
    [(Rejection(), 0.0), (Block(), 0.6)],
    ids=["rejection", "block, stopping when unsure"],
)
def test_a_round_has_exactly_the_targets_distribution(
    verifier: Rejection | Block, confidence: float
) -> None:
    """ENUM with vocabularies that share a part, and top-k within that part."""
    target, draft = pair()
    with torch.inference_mode():
        drafter = TliDrafter(target, draft, confidence)
        done = enumerate_round(
            target, drafter, verifier, 2, prompt=(0, 2, 1), distribution=distribution
        )
    assert done.total_variation < 1e-9
    assert done.acceptance_length > 1.05


class MaskedTooLate(TliDrafter):
    """Wrong: restricts the distribution after temperature and top-k, without renormalising it."""

    def _row(self, logits_BU: Tensor, prefix: Prefix) -> Tensor:
        logits_BV = self.shared.logits(logits_BU)
        probs_BV = ModelDrafter._row(self, logits_BV.clamp(min=float(logits_BU.min())), prefix)
        return probs_BV.masked_fill(~self.shared.is_shared_V, 0.0)


def test_a_distribution_that_is_not_renormalised_would_show() -> None:
    """MUT."""
    target, draft = pair()
    with torch.inference_mode():
        wrong = MaskedTooLate(target, draft)
        done = enumerate_round(
            target, wrong, Rejection(), 2, prompt=(0, 2, 1), distribution=distribution
        )
    assert done.total_variation > 1e-3


@pytest.mark.slow
def test_many_rounds_have_the_targets_distribution() -> None:
    """CHI2 over several rounds, in which the target emits words that the draft lacks; a correct
    drafter fails with probability 1e-4 (seed fixed)."""
    target, draft = pair()
    with torch.inference_mode():
        p = chi2(
            target,
            TliDrafter(target, draft),
            Rejection(),
            2,
            length=2,
            num_rows=4_000,
            prompt=(0, 2, 1),
            distribution=distribution,
        )
    assert p > 1e-4


@pytest.mark.parametrize("sampling", [SAMPLING, greedy(14)], ids=["sampled", "greedy"])
@pytest.mark.parametrize("kind", ["byte", "unigram", "fallback", "wordpiece"])
def test_equal_vocabularies_are_speculative_decoding(kind: str, sampling: Sampling) -> None:
    """Token for token, whatever the prompt, in a batch; also where the draft's ids are shuffled."""
    target, near = model(kind, 0, std=0.2), model(kind, 0, std=0.19)
    prompts = [*PROMPTS, *ragged_prompts([6, 1], len(tokenizer(kind)))]
    expected = engine_of(target, near, "speculative").generate(prompts, sampling)
    results = engine_of(target, near, TLI).generate(prompts, sampling)
    assert token_ids(results) == token_ids(expected)
    assert results.stats.accepted == expected.stats.accepted > 5


def test_other_ids_for_the_same_words_change_nothing() -> None:
    names = [f"w{i}" for i in range(30)] + ["<unk>"]
    order = torch.randperm(31, generator=torch.Generator().manual_seed(0))
    module = tiny_module("llama", 0, torch.float64, 0.2, vocab_size=31)
    near = tiny_module("llama", 0, torch.float64, 0.19, vocab_size=31)
    target, draft = HFModel(module, words(names)), HFModel(near, words(names))
    other = HFModel(shuffled(near, order), words([names[i] for i in order]))
    prompts = ragged_prompts([6, 1, 9], 31)
    expected = engine_of(target, draft, "speculative").generate(prompts, SAMPLING)
    results = engine_of(target, other, TLI).generate(prompts, SAMPLING)
    assert token_ids(results) == token_ids(expected)
    assert results.stats.accepted == expected.stats.accepted > 5


@pytest.mark.parametrize(("target", "draft"), list(product(KINDS, KINDS)))
def test_greedy_output_is_that_of_plain_decoding(target: str, draft: str) -> None:
    """Although random models emit what no tokenizer would."""
    models = model(target, 0), model(draft, 1)
    results = engine_of(*models, TLI).generate(PROMPTS, greedy(9))
    assert token_ids(results) == token_ids(engine_of(models[0]).generate(PROMPTS, greedy(9)))
    assert results.stats.drafted > 10


def test_rows_of_a_batch_are_rows_alone() -> None:
    models = model("wordpiece"), model("fallback", 1)
    both, alone = (engine_of(*models, TLI, max_batch_size=size) for size in (2, 1))
    expected = alone.generate(PROMPTS, SAMPLING)
    assert token_ids(both.generate(PROMPTS, SAMPLING)) == token_ids(expected)


@pytest.mark.parametrize("extra", [(0, 40), (40, 0), (40, 40)])
def test_padding_is_never_drafted(extra: tuple[int, int]) -> None:
    """Even if its logits are the largest."""
    models = model("byte", 0, extra[0]), model("byte-small", 1, extra[1])
    for each in models:
        with torch.no_grad():
            each.module.lm_head.weight[-40:] *= 5
    context = Context.start(
        [[5, 6], [7]], Warp([Sampling()] * 2, models[0].num_tokens), [0, 0], [0, 1]
    )
    drafter = TliDrafter(*models)
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, Budget(6), context.rng)
    assert int(draft.tokens_BN.max()) < len(tokenizer("byte"))
    assert draft.probs_BNV is not None
    assert float(draft.probs_BNV[:, :, len(tokenizer("byte")) :].sum()) == 0
    sampling = greedy(12)
    plain = engine_of(models[0]).generate(PROMPTS, sampling)
    assert token_ids(engine_of(*models, TLI).generate(PROMPTS, sampling)) == token_ids(plain)


@pytest.mark.parametrize("bias", [-torch.inf, 9.0])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_bias_against_all_shared_tokens(bias: float, temperature: float) -> None:
    """No shared token has mass, or all mass is on words that the draft lacks: the draft is still a
    draw from the declared distribution, and is rejected."""
    target, draft = toy(0, "a", "b", "c", "<unk>"), toy(1, "b", "q", "a", "r", "<unk>")
    biased = {0: bias, 1: bias, 3: bias} if bias < 0 else {2: bias}
    sampling = Sampling(
        temperature=temperature, logit_bias=biased, max_new_tokens=9, ignore_eos=True
    )
    results = engine_of(target, draft, TLI).generate([[0], [2, 1]], sampling)
    assert all(token == 2 for ids in token_ids(results) for token in ids)
    assert results.stats.accepted == 0 < results.stats.drafted


def test_processors_that_raise_tokens_the_draft_lacks() -> None:
    """ENUM: the distribution is restricted to shared tokens again."""
    target, draft = pair()

    def processor(input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.index_fill(1, torch.tensor([0]), 1.0)

    def processed(num_rows: int) -> Distribution:
        return Warp([Sampling(processors=[processor])] * num_rows, 3)

    drafter = TliDrafter(target, draft)
    context = Context.start([[0, 1]], processed(1), [0], [0])
    with torch.inference_mode():
        proposed = drafter.propose(drafter.start(context), context, Budget(3), context.rng)
        done = enumerate_round(target, drafter, Rejection(), 1, prompt=(1,), distribution=processed)
    assert proposed.probs_BNV is not None
    assert float(proposed.probs_BNV[..., 0].sum()) == 0
    torch.testing.assert_close(proposed.probs_BNV[0, :-1].sum(-1), torch.ones(3).double())
    assert done.total_variation < 1e-9


@pytest.mark.parametrize(("target", "draft"), [("byte", "unigram"), ("fallback", "byte-small")])
def test_the_cache_holds_the_committed_text(target: str, draft: str) -> None:
    """After any number of rounds the draft's distribution is that of a full pass over the committed
    text."""
    verification, drafter = model(target), TliDrafter(model(target), model(draft, 1))
    sampling = Sampling(temperature=1.3)
    prompts = [verification.tokenizer(text)["input_ids"] for text in PROMPTS]  # type: ignore[misc]
    context = Context.start(
        prompts, Warp([sampling] * 3, verification.num_tokens), [0] * 3, range(3)
    )
    with torch.inference_mode():
        cache, state = verification.start(context), drafter.start(context)
        for γ in (3, 0, 1, 5, 0, 4, 2):
            drawn = drafter.propose(state, context, Budget(γ), context.rng)
            if γ:
                _check_first_distribution(drafter, state, context, drawn.probs_BNV)
            scores = verification.score(cache, drawn)
            p_BNV = context.distribution(scores.logits_BNV, Prefix.of_draft(context, drawn))
            verdict = Rejection()(drawn, p_BNV, context.rng).read()
            verification.commit(cache, drawn, verdict)
            drafter.commit(state, drawn, verdict, scores)
            context.append(verdict.emitted(drawn), verdict.num_emitted)


def _check_first_distribution(
    drafter: TliDrafter, state: FollowState, context: Context, probs_BNV: Tensor | None
) -> None:
    assert probs_BNV is not None
    for b, row in enumerate(state.rows):
        logits_U = full_logits(drafter.model.module, row.tokens)[-1]
        z_V = drafter.shared.logits(logits_U[None])[0] / 1.3
        torch.testing.assert_close(probs_BNV[b, 0], z_V.softmax(-1))


def test_a_draft_that_runs_out_of_context() -> None:
    """The text needs more draft tokens than the draft's context has room for: the row goes on
    without drafts, and the other row is unaffected."""
    target, draft = model("byte"), model("unigram", 1, max_position_embeddings=36)
    prompts = ["The quick brown fox jumps over the", "x"]
    both, alone = (engine_of(target, draft, TLI, max_batch_size=size) for size in (2, 1))
    assert both.limit == 128
    results = both.generate(prompts, greedy(20))
    assert results[0].stats.drafted < 0.8 * results[1].stats.drafted
    assert token_ids(results) == token_ids(engine_of(target).generate(prompts, greedy(20)))
    sampled = (engine.generate(prompts, SAMPLING) for engine in (both, alone))
    assert token_ids(next(sampled)) == token_ids(next(sampled))


def test_errors_at_construction() -> None:
    with pytest.raises(InvalidParameterError, match="draft_confidence="):
        TliDrafter(*pair(), confidence=2.0)
    with pytest.raises(VocabularyMismatchError, match="no token exists in both"):
        TliDrafter(toy(0, "a", "<unk>"), toy(0, "b", "<unk>"))
    with pytest.raises(VocabularyMismatchError, match="the draft has no tokenizer"):
        Engine(toy(0, "a", "<unk>"), HFModel(tiny_module()), TLI)

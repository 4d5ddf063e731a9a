"""N-gram drafts: distribution, argmax, and the method in the engine.

Legend: B rows, N nodes, V vocabulary.
"""

from pathlib import Path

import numpy as np
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
from tiny_ngrams import ngram_file, tiny_file
from torch import Tensor

from outrider import Sampling
from outrider.core import Budget, Context, Distribution, Draft, Prefix, Stream, Verifier
from outrider.core.errors import (
    InvalidParameterError,
    ModelLoadError,
    VocabularyMismatchError,
)
from outrider.drafters.chain.none import NoState
from outrider.drafters.ngram.drafter import How, NgramDrafter, vocabulary_digest
from outrider.drafters.ngram.table import NgramTable
from outrider.methods import METHODS
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.testing import ToyModel, check_drafter, enumerate_round
from outrider.verifiers import Block, Greedy, Rejection

V = 3
SAMPLING = Sampling(temperature=0.8, frequency_penalty=0.3, logit_bias={0: 0.5})


def table(num_tokens: int = V, order: int = 3) -> NgramTable:
    """A table of a few random tokens, none of whose distributions is uniform or a point mass."""
    p_V = 1 / np.arange(1, num_tokens + 1)
    ids = np.random.default_rng(0).choice(num_tokens, 60, p=p_V / p_V.sum())
    return NgramTable.open(ngram_file([ids.tolist()], num_tokens, order=order))


def drafter(how: How, confidence: float = 0.0) -> NgramDrafter:
    return NgramDrafter(table(), V, how, confidence, dtype=torch.float64)


def distribution(num_rows: int) -> Distribution:
    """A distribution with every kind of sampling parameter."""
    return Warp([SAMPLING] * num_rows, V)


def greedy_distribution(num_rows: int) -> Distribution:
    return Warp([Sampling(temperature=0)] * num_rows, V)


def start(prompts: list[list[int]], sampling: Sampling, num_tokens: int = V) -> Context:
    B = len(prompts)
    return Context.start(prompts, Warp([sampling] * B, num_tokens), [0] * B, range(B))


# ---------------------------------------------------------------------------------- the proof


@pytest.mark.parametrize("confidence", [0.0, 0.4])
@pytest.mark.parametrize("how", ["sample", "argmax"])
def test_contract(how: How, confidence: float) -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    checked = NgramDrafter(table(6), 6, how, confidence)
    check_drafter(checked, 6, distribution=lambda B: Warp([Sampling(temperature=0.8)] * B, 6))


@pytest.mark.parametrize("confidence", [0.0, 0.45])
@pytest.mark.parametrize("how", ["sample", "argmax"])
@pytest.mark.parametrize("verifier", [Rejection(), Block()], ids=["rejection", "block"])
def test_a_round_has_exactly_the_targets_distribution(
    verifier: Verifier, how: How, confidence: float
) -> None:
    """ENUM: all drafts and decisions of one round, completed by the target, against the target."""
    target = ToyModel.random(V, seed=1)
    done = enumerate_round(
        target, drafter(how, confidence), verifier, 2, prompt=(0, 1), distribution=distribution
    )
    assert done.total_variation < 1e-12


@pytest.mark.parametrize("how", ["sample", "argmax"])
def test_a_round_at_temperature_zero(how: How) -> None:
    done = enumerate_round(
        ToyModel.random(V), drafter(how), Greedy(), 3, distribution=greedy_distribution
    )
    assert done.total_variation < 1e-12


class Unwarped(NgramDrafter):
    """The mutant that declares the table's own distribution where another one was drawn from."""

    def propose(self, state: NoState, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        assert draft.probs_BNV is not None
        rows = [
            [
                self.table.distribution(self.table.nodes([*_committed(context, b), *drafted[:i]]))
                for i in N
            ]
            for b, drafted in enumerate(draft.tokens_BN[:, 1:].tolist())
            if (N := range(len(drafted) + 1))
        ]
        return Draft.chain(draft.tokens_BN, draft.mask_BN, torch.tensor(np.array(rows)), "iid")


def _committed(context: Context, row: int) -> list[int]:
    return context.tokens_BT[row, : context.lengths[row]].tolist()


def test_a_distribution_that_was_not_drawn_from_would_show() -> None:
    mutant = Unwarped(table(), V, dtype=torch.float64)
    done = enumerate_round(
        ToyModel.random(V, seed=1), mutant, Rejection(), 1, distribution=distribution
    )
    assert done.total_variation > 1e-2


# ------------------------------------------------------------------------------ what it drafts


def test_argmaxes_are_those_of_the_table() -> None:
    prompts = [[0, 1, 0], [2], [1, 1, 2, 0]]
    context = start(prompts, Sampling())
    drafting = NgramDrafter(table(), V, "argmax")
    draft = drafting.propose(drafting.start(context), context, Budget(6), context.rng)
    assert draft.probs_BNV is None
    for row, prompt in zip(draft.tokens_BN.tolist(), prompts, strict=True):
        text = list(prompt)
        for _ in range(6):
            text.append(int(drafting.table.distribution(drafting.table.nodes(text)).argmax()))
        assert row == text[len(prompt) - 1 :]


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        SAMPLING,
        Sampling(temperature=0.8),
        Sampling(top_k=2),
        Sampling(top_p=0.6),
        Sampling(min_p=0.5),
        Sampling(presence_penalty=1.0),
        Sampling(repetition_penalty=2.0),
        Sampling(logit_bias={1: 2.0}),
    ],
    ids=str,
)
def test_distributions_are_the_tables_under_the_sampling_parameters(sampling: Sampling) -> None:
    """Without parameters it is the table's own distribution; otherwise it must not be."""
    prompts = [[0, 1, 0], [2], [1, 1, 2, 0]]
    context = start(prompts, sampling)
    drafting = drafter("sample")
    draft = drafting.propose(drafting.start(context), context, Budget(4), context.rng)
    assert draft.probs_BNV is not None
    for i in range(4):
        known = draft.tokens_BN[:, 1 : i + 1]
        rows: list[Tensor] = []
        for prompt, drafted in zip(prompts, known.tolist(), strict=True):
            nodes = drafting.table.nodes([*prompt, *drafted])
            rows.append(torch.from_numpy(drafting.table.distribution(nodes)).log())
        prefix = Prefix.of_chain(context, list(known.unbind(1)))
        expected_BV = context.distribution(torch.stack(rows)[:, None], prefix)[:, 0]
        assert torch.allclose(draft.probs_BNV[:, i], expected_BV, atol=1e-12)


def test_a_row_with_parameters_does_not_change_the_others() -> None:
    prompts = [[0, 1, 0], [0, 1, 0]]
    distribution = Warp([Sampling(), Sampling(top_k=1)], V)
    both = Context.start(prompts, distribution, [0, 0], range(2))
    drafting = drafter("sample")
    one = start(prompts[:1], Sampling())
    alone = drafting.propose(drafting.start(one), one, Budget(3), one.rng)
    draft = drafting.propose(drafting.start(both), both, Budget(3), both.rng)
    assert alone.probs_BNV is not None
    assert draft.probs_BNV is not None
    assert draft.tokens_BN[0].tolist() == alone.tokens_BN[0].tolist()
    assert torch.allclose(draft.probs_BNV[0], alone.probs_BNV[0], atol=1e-14)
    assert set(draft.probs_BNV[1, :3].flatten().tolist()) == {0.0, 1.0}


def test_target_ids_beyond_the_tables_vocabulary() -> None:
    """They are never drafted, and as context they match no gram."""
    context = start([[1, V + 1], [0, 1]], Sampling(), V + 2)
    drafting = NgramDrafter(table(), V + 2)
    draft = drafting.propose(drafting.start(context), context, Budget(3), context.rng)
    assert draft.probs_BNV is not None
    assert draft.probs_BNV.shape == (2, 4, V + 2)
    assert float(draft.probs_BNV[:, :, V:].max()) == 0
    unigram_V = torch.from_numpy(drafting.table.distribution([]))
    assert torch.allclose(draft.probs_BNV[0, 0, :V].double(), unigram_V, atol=1e-6)


@pytest.mark.parametrize("how", ["sample", "argmax"])
def test_the_last_token_of_a_stopped_draft_stays(how: How) -> None:
    """A row stops behind the first token less probable than the threshold, never before it."""
    prompts = [[x] for x in range(20)] * 4
    context = start(prompts, Sampling(), 30)
    drafting = NgramDrafter(table(30), 30, how, 0.3)
    draft = drafting.propose(drafting.start(context), context, Budget(5), context.rng)
    lengths = draft.num_drafted_B.tolist()
    assert len(set(lengths)) > 2
    for prompt, row, length in zip(prompts, draft.tokens_BN.tolist(), lengths, strict=True):
        q = [
            drafting.table.probability(drafting.table.nodes([*prompt[:-1], *row[:i]]), row[i])
            for i in range(1, length + 1)
        ]
        assert min(q[:-1], default=1) >= 0.3
        assert length == 5 or q[-1] < 0.3


# ------------------------------------------------------------------------------- in the engine


@pytest.mark.parametrize("how", ["sample", "argmax"])
@pytest.mark.parametrize("order", [1, 2, 4])
def test_greedy_output_is_that_of_plain_decoding(order: int, how: str) -> None:
    target, prompts = tiny("llama"), ragged_prompts([5, 1, 9])
    options = {"file": tiny_file(), "order": order, "draw": how}
    drafted = engine_of(target, None, "ngram", 4, options=options).generate(prompts, greedy(16))
    assert token_ids(drafted) == token_ids(engine_of(target).generate(prompts, greedy(16)))


def test_drafts_of_the_targets_own_output_are_accepted() -> None:
    """With a table of its greedy output the target needs fewer passes."""
    target, prompts = tiny("llama"), ragged_prompts([5])
    text = engine_of(target).generate(prompts, greedy(30))
    file = ngram_file([[*prompts[0], *token_ids(text)[0]]], VOCAB, order=5)
    options = {"file": str(file), "draw": "argmax"}
    drafted = engine_of(target, None, "ngram", 4, options=options).generate(prompts, greedy(30))
    assert token_ids(drafted) == token_ids(text)
    assert drafted.stats.acceptance_rate > 0.5


# ---------------------------------------------------------------------------------- bad input


def test_a_file_is_needed(tmp_path: Path) -> None:
    with pytest.raises(InvalidParameterError, match="outrider ngram build"):
        engine_of(tiny("llama"), None, "ngram")
    with pytest.raises(ModelLoadError, match="outrider ngram build"):
        engine_of(tiny("llama"), None, "ngram", options={"file": str(tmp_path / "none")})


def test_options_out_of_range_are_named() -> None:
    for options, why in (
        ({"draw": "best"}, "draw='best': must be one of sample, argmax"),
        ({"order": 5}, "order=5: .* orders 1 to 4"),
        ({"order": -1}, "order=-1"),
    ):
        with pytest.raises(InvalidParameterError, match=why):
            engine_of(tiny("llama"), None, "ngram", options={"file": tiny_file()} | options)
    with pytest.raises(InvalidParameterError, match="draft_confidence=2"):
        NgramDrafter(table(), V, "sample", 2)
    with pytest.raises(InvalidParameterError, match="draw='best'"):
        NgramDrafter(table(), V, "best")  # type: ignore[arg-type]


def test_corpora_of_another_vocabulary_are_refused() -> None:
    """By the tokenizers' mappings, or by the width if there is no mapping to compare."""
    ours, other = byte_tokenizer(), byte_tokenizer(["completely different words, are they"])
    target = HFModel(tiny_module("llama", vocab_size=len(ours) + 4), ours)
    kwargs = {"num_tokens": len(ours), "order": 2}
    digest = vocabulary_digest(ours.get_vocab())
    right = ngram_file([[1, 2, 3]], vocabulary=digest, **kwargs)
    engine_of(target, None, "ngram", options={"file": str(right)})  # padded logits are no matter

    wrong = ngram_file([[1, 2, 3]], vocabulary=vocabulary_digest(other.get_vocab()), **kwargs)
    unnamed = ngram_file([[1, 2, 3]], **kwargs)
    for file, model in ((wrong, target), (unnamed, target), (right, tiny("llama"))):
        with pytest.raises(VocabularyMismatchError, match="outrider ngram build --target") as error:
            engine_of(model, None, "ngram", options={"file": str(file)})
        assert str(file) in str(error.value)


def test_the_row_of_the_method() -> None:
    method = METHODS["ngram"]
    assert (method.needs_draft, method.lossless, method.needs) == (False, True, "n-gram file")
    assert list(method.options) == ["file", "order", "draw"]

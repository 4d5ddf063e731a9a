"""String-level rejection sampling on vocabularies so small that all strings can be listed.

Legend: V the target's vocabulary, U the draft's.
"""

from dataclasses import replace

import pytest
import torch
from real_tokenizers import model
from tiny_models import engine_of, full_logits, greedy, tiny_module, token_ids
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from outrider import Sampling
from outrider.core import Budget, Context, Distribution, Draft, Stream
from outrider.core.errors import IncompatibleError, NonFiniteLogitsError
from outrider.drafters.chain.none import NoState
from outrider.drafters.vocabulary.slrs import SlrsDrafter
from outrider.drafters.vocabulary.tli import TliDrafter
from outrider.methods import Method
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.testing import check_drafter, enumerate_round
from outrider.verifiers import Rejection

SLRS = Method(
    "slrs",
    "String-level rejection sampling.",
    "Timor et al., ICML 2025",
    "draft model",
    Rejection,
    lambda parts: SlrsDrafter(parts.target, parts.draft_model),
    any_vocabulary=True,
)


def toy(seed: int, *pieces: str) -> HFModel:
    """Tokens that are strings, without spaces between them."""
    ids = {piece: number for number, piece in enumerate(pieces)}
    pairs = [(piece[:1], piece[1:]) for piece in pieces if len(piece) > 1 and piece[1:] in ids]
    made = Tokenizer(models.BPE(ids, pairs))
    made.decoder = decoders.Fuse()
    module = tiny_module(
        "llama", seed, torch.float64, 0.25, vocab_size=len(pieces), num_hidden_layers=1
    )
    return HFModel(module, PreTrainedTokenizerFast(tokenizer_object=made))


def pair() -> tuple[HFModel, HFModel]:
    """The target's longest token is two of the draft's, or part of two of them."""
    return toy(0, "a", "b", "ab"), toy(3, "ba", "b", "a")


def distribution(num_rows: int) -> Distribution:
    return Warp([Sampling(temperature=0.8, frequency_penalty=0.3)] * num_rows, 3)


def test_psi_is_the_sum_over_all_strings() -> None:
    """By hand: b and ba begin with b; a waits for the next letter."""
    target, draft = pair()
    drafter = SlrsDrafter(target, draft)
    told = drafter.bridge.translate([0, 1])

    def q(*string: int) -> dict[str, float]:
        probs_U = full_logits(draft.module, [*told, *string])[-1].softmax(-1)
        return dict(zip(("ba", "b", "a"), probs_U.tolist(), strict=True))

    first, after_a = q(), q(2)
    expected = [
        first["a"] * after_a["a"],
        first["b"] + first["ba"],
        first["a"] * (after_a["b"] + after_a["ba"]),
    ]
    with torch.inference_mode():
        psi_V = drafter.psi([0, 1])
    torch.testing.assert_close(psi_V, torch.tensor(expected).double())
    torch.testing.assert_close(psi_V.sum(), torch.tensor(1.0).double())


def test_contract() -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    with torch.inference_mode():
        check_drafter(SlrsDrafter(*pair()), 3, 3, num_samples=1024)


def test_a_round_has_exactly_the_targets_distribution() -> None:
    """ENUM, with a token of the target's that the draft lacks; it is accepted, too. What is drawn
    at later places is what is declared there: ``test_contract``."""
    target, draft = pair()
    with torch.inference_mode():
        done = enumerate_round(
            target, SlrsDrafter(target, draft), Rejection(), 1, distribution=distribution
        )
        tli = enumerate_round(
            target, TliDrafter(target, draft), Rejection(), 1, distribution=distribution
        )
    assert done.total_variation < 1e-9
    assert sum(mass for tokens, mass in done.emitted.items() if len(tokens) > 1 and 2 in tokens) > 0
    assert not any(2 in tokens[:-1] for tokens in tli.emitted)


class OnePath(SlrsDrafter):
    """Declares the mass of one string for that of all."""

    def propose(self, state: NoState, context: Context, budget: Budget, rng: Stream) -> Draft:
        draft = super().propose(state, context, budget, rng)
        assert draft.probs_BNV is not None
        wrong_BNV = draft.probs_BNV * torch.tensor([1.0, 0.6, 0.5])
        return replace(draft, probs_BNV=wrong_BNV)


def test_the_mass_of_one_string_would_show() -> None:
    """MUT."""
    target, draft = pair()
    with torch.inference_mode():
        done = enumerate_round(
            target, OnePath(target, draft), Rejection(), 1, distribution=distribution
        )
    assert done.total_variation > 1e-3


def test_through_the_engine() -> None:
    target, draft = toy(0, "a", "b", "ab", "c"), toy(1, "b", "a", "x", "bb")
    plain = engine_of(target).generate([[0], [2, 1]], greedy(9))
    engine = engine_of(target, draft, SLRS, γ=3)
    assert token_ids(engine.generate([[0], [2, 1]], greedy(9))) == token_ids(plain)
    sampling = Sampling(max_new_tokens=9, ignore_eos=True)
    together = engine.generate([[0], [2, 1]], [greedy(9), sampling])
    alone = [engine.generate([p], s)[0] for p, s in (([0], greedy(9)), ([2, 1], sampling))]
    assert token_ids(together) == token_ids(alone)
    assert together.stats.accepted > 0
    forbidden = Sampling(logit_bias=dict.fromkeys(range(3), -torch.inf), max_new_tokens=4)
    assert token_ids([engine.generate([[0]], forbidden)[0]]) == [(3,) * 4]


def test_a_damaged_draft_model_is_named() -> None:
    target, draft = pair()
    with torch.no_grad():
        draft.module.lm_head.weight[0] = torch.nan
    with pytest.raises(NonFiniteLogitsError, match=r"draft .*position 1;"):
        engine_of(target, HFModel(draft.module, draft.tokenizer, "draft"), SLRS).generate([[0, 1]])


def test_vocabularies_beyond_the_bound_are_refused() -> None:
    """Those of any model in use."""
    with pytest.raises(IncompatibleError, match=r"more than 4096 strings.*take method='tli'"):
        SlrsDrafter(model("byte"), model("unigram"))
    with pytest.raises(IncompatibleError, match="more than 3 strings"):
        SlrsDrafter(*pair(), max_strings=3)
    with pytest.raises(IncompatibleError, match="begins with a token of the target"):
        SlrsDrafter(toy(0, "a"), toy(0, "b"))

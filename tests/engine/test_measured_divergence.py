"""The measured divergence of lossy methods against full forward passes over the output.

Legend: T tokens, V vocabulary.
"""

from types import SimpleNamespace
from typing import cast

import pytest
import torch
from tiny_models import engine_of, full_logits, ragged_prompts, tiny
from torch import Tensor

from outrider import Result, Sampling, Stats
from outrider.core import Draft, Round, output_distribution
from outrider.core.divergences import divergences
from outrider.engine.measured_divergence import is_measurable, measured_divergence
from outrider.engine.round_counts import RoundCounts
from outrider.methods import METHODS
from outrider.verifiers import Lenience, Mentored

TARGET = tiny("llama", 0, dtype=torch.float64)
DRAFT = tiny("llama", 3, dtype=torch.float64)
PROMPTS = ragged_prompts([5, 2, 8])
SAMPLING = Sampling(temperature=0.9, max_new_tokens=17, ignore_eos=True)
MEASURED = [
    name
    for name, method in METHODS.items()
    if is_measurable(method.recipe().verifier) and not method.needs_head
]


def distributions(result: Result, module: torch.nn.Module) -> Tensor:
    """The model's distribution at each emitted token, (T, V)."""
    tokens = [*result.prompt_ids, *result.token_ids]
    logits_TV = full_logits(module, tokens)  # type: ignore[arg-type]
    return (logits_TV[len(result.prompt_ids) - 1 : -1] / SAMPLING.temperature).softmax(-1)


@pytest.mark.parametrize("method", MEASURED)
def test_sums_match_the_finished_output(method: str) -> None:
    """Accepted and corrected tokens follow π, bonus tokens p. Outputs also end inside rounds."""
    engine = engine_of(TARGET, DRAFT, method, 4)
    results = engine.generate(PROMPTS, SAMPLING)
    for result in results:
        p_TV, q_TV = distributions(result, TARGET.module), distributions(result, DRAFT.module)
        found = divergences(p_TV, output_distribution(engine.verifier, p_TV, q_TV))  # type: ignore[arg-type]
        drafted_T = torch.tensor(
            [origin in ("accepted", "correction") for origin in result.origins]
        )
        assert result.stats.measured == int(drafted_T.sum()) > 0
        for name, values_T in (
            ("kl", found.kl),
            ("reverse_kl", found.rkl),
            ("tv", found.tv),
        ):
            expected = float(values_T[drafted_T].sum())
            assert getattr(result.stats, name) == pytest.approx(expected, rel=1e-6), name
    total = results.stats
    assert total.texts == len(PROMPTS)
    assert total.kl_per_token == pytest.approx(sum(r.stats.kl for r in results) / total.emitted)
    assert total.kl_per_text == pytest.approx(sum(r.stats.kl for r in results) / 3)


@pytest.mark.parametrize("method", ["plain", "speculative", "block", "coupled"])
def test_lossless_methods_have_no_divergence(method: str) -> None:
    stats = engine_of(TARGET, DRAFT, method).generate(PROMPTS, SAMPLING).stats
    assert (stats.measured, stats.kl, stats.reverse_kl, stats.tv) == (0, 0, 0, 0)


def test_measuring_is_optional_and_changes_no_token() -> None:
    one, other = (
        engine_of(TARGET, DRAFT, "ensemble", measure=measure).generate(PROMPTS, SAMPLING)
        for measure in (True, False)
    )
    assert [r.token_ids for r in one] == [r.token_ids for r in other]
    assert (one.stats.measured > 0, other.stats.measured) == (True, 0)


def test_positions_after_the_end_of_the_output_are_not_counted() -> None:
    """Four tokens are accepted, and the output keeps two of them."""
    stats = Stats(texts=1)
    reached, overlap = [1.0, 0.9, 0.8, 0.8, 0.4], [0.9, 0.8, 0.8, 0.4, 0.1]
    counts = RoundCounts(5, 5, True, reached, overlap, [(1.0, 2.0, 0.5)] * 5)
    stats.count(counts, accepted=4, kept=2)
    assert (stats.reached, stats.overlap) == pytest.approx((1.9, 1.7))
    assert (stats.measured, stats.kl, stats.reverse_kl, stats.tv) == (2, 2.0, 4.0, 1.0)


def test_infinity_is_valid_json() -> None:
    stats = Stats(kl=float("inf"), emitted=2, texts=1, measured=1)
    assert stats.as_dict()["kl"] == stats.as_dict()["kl_per_token"] == "inf"


def test_trees_are_not_measured() -> None:
    """A rule of chains that verifies trees as well: no number rather than a wrong one."""
    stats = engine_of(TARGET, DRAFT, "medusa", 4).generate(PROMPTS, SAMPLING).stats
    assert stats.drafted > 0
    assert stats.measured == 0


def test_rounding_does_not_make_a_bounded_divergence_infinite() -> None:
    """At a low temperature, float32 leaves some tokens a trace of p and none of π."""
    generator = torch.Generator().manual_seed(0)
    z_BV = 3 * torch.randn(300, 512, generator=generator)
    y_BV = z_BV + 1.5 * torch.randn(300, 512, generator=generator)
    p_BV, q_BV = (z_BV / 0.15).softmax(-1), (y_BV / 0.15).softmax(-1)
    rule = Mentored(0.5)
    assert divergences(p_BV, output_distribution(rule, p_BV, q_BV)).kl.isinf().any()
    two_BN = torch.zeros(300, 2, dtype=torch.int64)
    q_BNV = torch.stack([q_BV, torch.zeros_like(q_BV)], 1)
    draft = Draft.chain(two_BN, None, q_BNV, "iid")
    found = measured_divergence(
        cast("Round", SimpleNamespace(draft=draft, p_BNV=p_BV[:, None].expand(-1, 2, -1))), rule
    )
    assert found is not None
    assert float(found[..., 0].max()) <= 0.5 + 1e-6


def test_a_token_that_only_the_target_emits_makes_the_divergence_infinite() -> None:
    p_BNV = torch.tensor([[[0.9, 0.1], [0.9, 0.1]]])
    draft = Draft.chain(torch.zeros(1, 2, dtype=torch.int64), None, None, "chosen")
    rule = Lenience(0.1)
    found = measured_divergence(cast("Round", SimpleNamespace(draft=draft, p_BNV=p_BNV)), rule)
    assert found is not None
    assert float(found[0, 0, 0]) == torch.inf

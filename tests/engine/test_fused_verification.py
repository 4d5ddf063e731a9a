"""Fused verification, a compiled rule with its distributions, equals the rule run eagerly."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from interpreted_graphs import interpreted
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids
from torch import nn
from torch.export import ExportedProgram

from outrider import Engine, Sampling, verifiers
from outrider.core import NUM_PER_ROLE, Draft, Stream, Verdict, verify_eagerly
from outrider.core.context import Context
from outrider.core.errors import OutriderWarning
from outrider.runtime.executors.compile_cache import Program, compiled_program, dependencies
from outrider.runtime.executors.fused_verification import CompiledVerifier
from outrider.runtime.kernels.build import find_compiler
from outrider.sampling import Warp
from outrider.verifiers import (
    Block,
    Greedy,
    Lenience,
    Rejection,
    Relaxed,
    RelaxedGreedy,
    SampleMatch,
    Typical,
)

V, γ = 37, 4
DISTRIBUTIONS = [Rejection(), SampleMatch(), Lenience(0.4), Typical(), Relaxed()]
LOGITS = [Greedy(), RelaxedGreedy()]
SAMPLED = Sampling(temperature=0.8, seed=3, max_new_tokens=20, ignore_eos=True)


def made(module: nn.Module, trace: Callable[[], ExportedProgram], own: bool) -> Program:
    return interpreted(module, trace)


class Counted:
    """Compiles graphs, and counts them and their calls."""

    def __init__(self) -> None:
        self.graphs = self.calls = 0

    def __call__(self, module: nn.Module, trace: Any, own: bool) -> Program:
        self.graphs += 1
        graph = interpreted(module, trace)

        def counted(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
            self.calls += 1
            return graph(inputs)

        return counted


def case(rows: int, drawn: Any, temperature: float = 0.8, seed: int = 0) -> tuple[Any, ...]:
    """Drafted chains, the target's logits, and a context with its distribution."""
    generator = torch.Generator().manual_seed(seed)
    logits_BNV = 2 * torch.randn(rows, γ + 1, V, generator=generator)
    near_BNV = logits_BNV + torch.randn(rows, γ + 1, V, generator=generator)
    q_BNV = near_BNV.softmax(-1)
    tokens_BD = torch.multinomial(q_BNV[:, :-1].flatten(0, 1), 1, generator=generator)
    if drawn == "chosen":
        tokens_BD = near_BNV[:, :-1].argmax(-1)
    tokens_BN = torch.cat([torch.zeros(rows, 1).long(), tokens_BD.view(rows, γ)], 1)
    samplings = [Sampling(temperature=temperature * (drawn == "iid"))] * rows
    distribution = Warp(samplings, V)
    context = Context.start([[1, 2, 0]] * rows, distribution, range(seed, seed + rows), range(rows))
    draft = Draft.chain(tokens_BN, None, q_BNV if drawn == "iid" else None, drawn)
    return draft, logits_BNV, context, context.rng


@pytest.mark.parametrize("rule", DISTRIBUTIONS + LOGITS, ids=repr)
def test_verdicts_equal_those_of_the_rule(rule: Any) -> None:
    """In 60 rounds of one or several rows."""
    verification = CompiledVerifier(made, γ)
    for seed in range(60):
        rows = (1, 2, 5)[seed % 3]
        round_ = case(
            rows, "iid" if rule.needs == "distribution" else "chosen", (0.8, 1.0)[seed % 2], seed
        )
        found, wanted = verification(rule, *round_), verify_eagerly(rule, *round_)
        accepted_B = wanted.verdict.num_accepted_B
        assert torch.equal(found.verdict.num_accepted_B, accepted_B)
        assert torch.equal(found.verdict.next_token_B, wanted.verdict.next_token_B)
        assert torch.equal(found.verdict.path_BD, wanted.verdict.path_BD)
        emitted_BN = torch.arange(γ + 1) <= accepted_B[:, None]
        assert torch.equal(found.emitted_BK[emitted_BN], wanted.emitted_BK[emitted_BN])
        torch.testing.assert_close(found.p_BNV, wanted.p_BNV)
    assert verification._last is not None
    assert verification._last[2] is not None


def test_every_traceable_rule_is_covered() -> None:
    public = (getattr(verifiers, name) for name in verifiers.__all__)
    traceable = {rule for rule in public if vars(rule).get("traceable") is True}
    assert traceable == {type(rule) for rule in DISTRIBUTIONS + LOGITS}


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("sampling", [greedy(20), SAMPLED], ids=["greedy", "sampled"])
def test_outputs_equal_those_of_eager_verification(sampling: Sampling, batch: int) -> None:
    """Also in ragged batches that rows leave."""
    prompts = ragged_prompts([9, 3, 14])
    wanted = engine_of(tiny(), tiny(seed=1), max_batch_size=batch).generate(prompts, sampling)
    engine, maker = verifying(max_batch_size=batch)
    found = engine.generate(prompts, sampling)
    assert token_ids(found) == token_ids(wanted)
    assert maker.graphs == 1
    assert maker.calls > 5
    for one, other in zip(found, wanted, strict=True):
        assert one.origins == other.origins
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)
        assert one.stats.accepted == other.stats.accepted


def test_statistics_are_equal_where_sequences_end() -> None:
    """Drafts extend past the end; nothing after it is read or counted."""
    prompts = ragged_prompts([5] * 24)
    sampling = replace(SAMPLED, temperature=1.0, ignore_eos=False)
    engine, maker = verifying(max_batch_size=24)
    plain = engine_of(tiny(), tiny(seed=1), max_batch_size=24)
    engine.eos_ids = plain.eos_ids = frozenset(range(0, 101, 9))
    found, wanted = engine.generate(prompts, sampling), plain.generate(prompts, sampling)
    assert maker.calls > 3
    for one, other in zip(found, wanted, strict=True):
        assert one.token_ids == other.token_ids
        assert (one.stats.drafted, one.stats.accepted) == (
            other.stats.drafted,
            other.stats.accepted,
        )
        assert one.stats.reached == pytest.approx(other.stats.reached, abs=1e-4)
        assert one.stats.overlap == pytest.approx(other.stats.overlap, abs=1e-4)


def verifying(**settings: Any) -> tuple[Engine, Counted]:
    """An engine with fused verification, and the compiler of its programs."""
    engine = engine_of(tiny(), tiny(seed=1), γ=γ, **settings)
    maker = Counted()
    engine.verification = CompiledVerifier(maker, γ)
    return engine, maker


@pytest.mark.parametrize(
    "settings",
    [{"top_p": 0.8}, {"top_k": 5}, {"repetition_penalty": 1.2}, {"logit_bias": {3: 2.0}}],
    ids=str,
)
def test_distributions_with_more_than_a_temperature_are_verified_eagerly(settings: Any) -> None:
    engine, maker = verifying()
    sampling = replace(SAMPLED, max_new_tokens=8, **settings)
    wanted = engine_of(tiny(), tiny(seed=1)).generate(ragged_prompts([9]), sampling)
    assert token_ids(engine.generate(ragged_prompts([9]), sampling)) == token_ids(wanted)
    assert maker.graphs == 0


@pytest.mark.parametrize("rule", [Block(), Lenience(0.4), Typical()], ids=repr)
def test_the_divergence_of_lossy_rules_is_still_measured(rule: Any) -> None:
    wanted = engine_of(tiny(), tiny(seed=1), verifier=rule).generate(ragged_prompts([9]), SAMPLED)
    engine, maker = verifying(verifier=rule)
    found = engine.generate(ragged_prompts([9]), SAMPLED)
    assert token_ids(found) == token_ids(wanted)
    assert found.stats.kl == pytest.approx(wanted.stats.kl, rel=1e-4, abs=1e-6)
    assert maker.graphs == (0 if isinstance(rule, Block) else 1)


def test_exact_models_are_verified_eagerly_when_sampling() -> None:
    """A compiled softmax may round differently from torch's; an argmax cannot."""
    maker = Counted()
    verification = CompiledVerifier(maker, γ, exact=True)
    verification(Rejection(), *case(1, "iid"))
    assert maker.graphs == 0
    verification(Greedy(), *case(1, "chosen"))
    assert maker.graphs == 1


def test_other_lengths_and_masks_are_verified_eagerly() -> None:
    maker = Counted()
    draft, *rest = case(2, "chosen")
    CompiledVerifier(maker, γ - 1)(Greedy(), draft, *rest)
    masked = Draft.chain(draft.tokens_BN, draft.mask_BN.clone(), None, "chosen")
    CompiledVerifier(maker, γ)(Greedy(), masked, *rest)
    CompiledVerifier(maker, NUM_PER_ROLE).warm_up(Rejection(), torch.zeros(1, NUM_PER_ROLE + 1, V))
    assert maker.graphs == 0


@dataclass(frozen=True)
class Peeking(Rejection):
    """Wrong: declares that it can be traced, but reads a number on the host."""

    traceable: ClassVar[bool] = True

    def __call__(self, draft: Draft, p_BNV: torch.Tensor, rng: Stream) -> Verdict:
        assert bool((p_BNV >= 0).all())
        return super().__call__(draft, p_BNV, rng)


def failing(module: nn.Module, trace: Any, own: bool) -> Program:
    raise RuntimeError("no compiler today\nand much more")


def crashing(module: nn.Module, trace: Any, own: bool) -> Program:
    def graph(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        raise RuntimeError("no such symbol")

    return graph


def inexact(module: nn.Module, trace: Any, own: bool) -> Program:
    def graph(inputs: list[torch.Tensor]) -> list[torch.Tensor]:
        *decided, p_BNV, overlap_B = module(*inputs)
        return [*decided, 1.001 * p_BNV, overlap_B]

    return graph


def lying(module: nn.Module, trace: Any, own: bool) -> Program:
    return lambda inputs: [*interpreted(module, trace)(inputs)[:1], *[inputs[1][:, 0]] * 5]


@pytest.mark.parametrize(
    ("maker", "rule", "text"),
    [
        (made, Peeking(), "Peeking does not compile, so it verifies as it is"),
        (failing, Rejection(), "no compiler today"),
        (
            lying,
            Rejection(),
            "Rejection: .* compiled, but it accepts or emits other tokens",
        ),
        (crashing, Rejection(), "compiled, but it fails when it is run: no such symbol"),
        (
            inexact,
            Rejection(),
            "but its results differ .* error .* where 1e-05 is allowed",
        ),
    ],
    ids=["opaque", "no compiler", "wrong", "crashing", "inexact"],
)
def test_a_rule_that_does_not_compile_is_run_eagerly_after_one_warning(
    maker: Any, rule: Any, text: str
) -> None:
    verification = CompiledVerifier(maker, γ)
    round_ = case(1, "iid")
    with pytest.warns(OutriderWarning, match=text) as caught:
        found = verification(rule, *round_)
    assert len(caught) == 1
    assert torch.equal(found.emitted_BK, verify_eagerly(rule, *round_).emitted_BK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verification(rule, *round_)


def test_each_rule_length_and_vocabulary_has_its_own_cache_key() -> None:
    """A program is compiled for these sizes and looked up by this key."""
    names = []

    def named(module: nn.Module, trace: Any, own: bool) -> Program:
        names.append(str(dependencies(module)))
        return lambda inputs: list(module(*inputs))

    for num_drafted, logits_BNV in (
        (γ, torch.zeros(1, γ + 1, V)),
        (γ - 1, torch.zeros(1, γ, V)),
        (γ, torch.zeros(1, γ + 1, V + 1)),
        (γ, torch.zeros(1, γ + 1, V, dtype=torch.bfloat16)),
    ):
        verification = CompiledVerifier(named, num_drafted)
        for rule in (Rejection(), Lenience(0.4), Lenience(0.5), Greedy()):
            verification.warm_up(rule, logits_BNV)
    assert len(names) == len(set(names)) == 16


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rejection(), Greedy()], ids=repr)
def test_compiled_verdicts_equal_those_of_the_rule(
    rule: Any, tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path))
    verification = CompiledVerifier(compiled_program, γ)
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutriderWarning)
        verification.warm_up(rule, torch.zeros(1, γ + 1, V))
    for seed in range(30):
        round_ = case(1 + seed % 3, "iid" if rule.needs == "distribution" else "chosen", seed=seed)
        found, wanted = verification(rule, *round_), verify_eagerly(rule, *round_)
        assert torch.equal(found.verdict.num_accepted_B, wanted.verdict.num_accepted_B)
        assert torch.equal(found.verdict.next_token_B, wanted.verdict.next_token_B)
    assert verification._last is not None
    assert verification._last[2] is not None

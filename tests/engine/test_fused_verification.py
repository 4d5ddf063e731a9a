"""Fused verification, a compiled rule with its distributions, equals the rule run eagerly."""

import warnings
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from interpreted_graphs import interpreted, traced, untraced
from tiny_models import COMPILED, engine_of, greedy, ragged_prompts, tiny, token_ids
from torch import nn
from torch.export import ExportedProgram

from outrider import Engine, Sampling, verifiers
from outrider.core import (
    NUM_PER_ROLE,
    Context,
    Draft,
    Scores,
    Stream,
    Verdict,
    Verification,
    verify_eagerly,
)
from outrider.core.capabilities import TreeShape
from outrider.core.counts import DraftCounts
from outrider.core.errors import IncompatibleError, OutriderError, OutriderWarning
from outrider.core.overlap import accepted_nodes, estimated_overlap, overlap_by_depth
from outrider.core.walk import LOOPS_FROM
from outrider.engine.warming import programs_of, warm_up
from outrider.runtime.executors.compile_cache import Program, compiled_program, dependencies
from outrider.runtime.executors.fused_verification import CompiledVerifier
from outrider.runtime.executors.verification_program import MOST_NODES, DraftKind
from outrider.runtime.kernels import use_kernels
from outrider.runtime.kernels.build import find_compiler
from outrider.sampling import Warp
from outrider.verifiers import (
    Bild,
    Block,
    Cascade,
    CascadeGreedy,
    Coupled,
    Distinct,
    Ensemble,
    EnsembleGreedy,
    Greedy,
    Joint,
    Lenience,
    Mentored,
    Mtad,
    Rejection,
    Relaxed,
    RelaxedGreedy,
    SampleMatch,
    Spectr,
    Traversal,
    Typical,
)

V, γ = 37, 4
DISTRIBUTIONS = [
    Rejection(),
    Block(),
    SampleMatch(),
    Lenience(0.4),
    Typical(),
    Relaxed(),
    Ensemble(0.7),
    Bild(2.0, "mjsd"),
    Coupled(),
    Joint(0.3),
    Mtad(0.3),
]
DRAWN = [Cascade(each, 0.3) for each in ("chow", "diff", "opt", "token_v1", "token_v2", "token_v3")]
LOGITS = [Greedy(), RelaxedGreedy(), Bild(2.0)]
OF_BOTH_LOGITS = [EnsembleGreedy(0.4), CascadeGreedy("opt", 0.3), CascadeGreedy()]
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


def case(
    rows: int,
    drawn: Any,
    temperature: float = 0.8,
    seed: int = 0,
    num_drafted: int = γ,
    with_logits: bool = False,
    V: int = V,
    **settings: Any,
) -> tuple[Any, ...]:
    """Drafted chains, the target's logits, and a context with its distribution."""
    γ = num_drafted
    generator = torch.Generator().manual_seed(seed)
    logits_BNV = 2 * torch.randn(rows, γ + 1, V, generator=generator)
    near_BNV = logits_BNV + torch.randn(rows, γ + 1, V, generator=generator)
    q_BNV = near_BNV.softmax(-1)
    tokens_BD = torch.multinomial(q_BNV[:, :-1].flatten(0, 1), 1, generator=generator)
    if drawn == "chosen":
        tokens_BD = near_BNV[:, :-1].argmax(-1)
    tokens_BN = torch.cat([torch.zeros(rows, 1).long(), tokens_BD.view(rows, γ)], 1)
    samplings = [Sampling(temperature=temperature, **settings)] * rows
    distribution = Warp(samplings, V)
    context = Context.start([[1, 2, 0]] * rows, distribution, range(seed, seed + rows), range(rows))
    logits = near_BNV if with_logits else None
    draft = Draft.chain(tokens_BN, None, None if drawn == "chosen" else q_BNV, drawn, logits)
    return draft, Scores(logits_BNV), context, context.rng


TRUNCATIONS: list[dict[str, Any]] = [
    {},
    {"top_p": 0.8},
    {"top_k": 5},
    {"min_p": 0.1},
    {"top_p": 0.7, "top_p_convention": "paper", "top_k": 12, "min_p": 0.02},
]


def assert_same(found: Verification, wanted: Verification, by_logits: bool = False) -> None:
    """The same tokens, distributions and statistics."""
    accepted_B = wanted.verdict.num_accepted_B
    assert torch.equal(found.verdict.num_accepted_B, accepted_B)
    assert torch.equal(found.verdict.next_token_B, wanted.verdict.next_token_B)
    on_path_BD = torch.arange(wanted.verdict.path_BD.shape[1]) < accepted_B[:, None]
    assert torch.equal(found.verdict.path_BD[on_path_BD], wanted.verdict.path_BD[on_path_BD])
    emitted_BN = torch.arange(wanted.emitted_BK.shape[1]) <= accepted_B[:, None]
    assert torch.equal(found.emitted_BK[emitted_BN], wanted.emitted_BK[emitted_BN])
    torch.testing.assert_close(found.p_BNV, wanted.p_BNV)
    if found.counts is not None:
        counts = DraftCounts.of(wanted.draft, wanted.verdict)
        assert all(map(torch.equal, found.counts, counts))
    if found.overlap is not None:
        overlap = estimated_overlap(wanted.draft, wanted.p_BNV)
        if by_logits:
            accepted_BD = accepted_nodes(wanted.draft, wanted.verdict)
            overlap = overlap_by_depth(wanted.draft, accepted_BD)
        for one, other in zip(found.overlap, overlap, strict=True):
            torch.testing.assert_close(one, other)


@pytest.mark.parametrize("rule", DISTRIBUTIONS + DRAWN + LOGITS + OF_BOTH_LOGITS, ids=repr)
def test_verdicts_equal_those_of_the_rule(rule: Any) -> None:
    """In 120 rounds of one or several rows, of 1 to 7 drafted tokens, some of which do not exist in
    some rows, with every truncation, drawn, chosen and searched."""
    maker = Counted()
    verification = CompiledVerifier(maker)
    drawns = tuple(each for each in ("iid", "chosen", "searched") if each in rule.accepts)
    if rule.needs != "distribution":
        drawns = ("chosen",)
    with_logits = rule in OF_BOTH_LOGITS
    temperatures = (0.8, 1.0) if rule.needs == "distribution" else (0.0, 0.0)
    for seed in range(120):
        rows, drawn = (1, 2, 5)[seed % 3], drawns[seed % len(drawns)]
        truncation, num = TRUNCATIONS[seed % 5] if temperatures[0] else {}, 1 + seed % 7
        temperature = temperatures[seed % 4 // 2]
        draft, *rest = case(rows, drawn, temperature, seed, num, with_logits, **truncation)
        if seed % 2:
            length_B1 = torch.arange(rows)[:, None] + seed % (num + 1)
            mask_BN = torch.arange(num + 1) <= length_B1 % (num + 1)
            draft = replace(draft, mask_BN=mask_BN)
        assert_same(verification(rule, draft, *rest), verify_eagerly(rule, draft, *rest))
    assert maker.graphs == len(drawns)
    assert maker.calls == 120 + 3 * len(drawns)  # those that compare the programs with the rule


@pytest.mark.parametrize("rule", DISTRIBUTIONS, ids=repr)
def test_verdicts_on_drafts_of_no_token_equal_those_of_the_rule(rule: Any) -> None:
    """They have a program once it is asked for, and are verified eagerly until then."""
    if "chosen" not in rule.accepts:
        pytest.skip("it accepts no such drafts")
    maker, kind = Counted(), DraftKind("chosen", root_only=True)
    verification = CompiledVerifier(maker)
    for seed in range(20):
        rows, truncation = (1, 2, 5)[seed % 3], TRUNCATIONS[seed % 5]
        _, scores, context, rng = case(rows, "chosen", 0.8, seed, 1, **truncation)
        logits_BNV = scores.logits_BNV[:, :1]
        round_ = Draft.root_only(context.root_B), Scores(logits_BNV), context, rng
        if seed == 10:
            assert maker.graphs == 0
            verification.warm_up(rule, kind, logits_BNV)
        assert_same(verification(rule, *round_), verify_eagerly(rule, *round_))
    assert (maker.graphs, maker.calls) == (1, 10 + 3)


SOLVED = [
    (Mentored(0.1), V, ("iid", "chosen")),
    (Mentored(0.1), 1_100, ("chosen",)),
    (Mentored(0.1), 9_000, ("iid",)),
    (Mentored(0.1, "chi2", allow_off_support=True), V, ("iid",)),
    (Mentored(0.1, bracket="blog"), V, ("iid",)),
    (Coupled(), 2_000, ("iid", "chosen")),
]


@pytest.mark.parametrize(("rule", "num_tokens", "drawns"), SOLVED, ids=str)
def test_verdicts_that_are_solved_for_equal_those_of_the_rule(
    rule: Any, num_tokens: int, drawns: tuple[Any, ...]
) -> None:
    """Rules whose programs have loops, at sizes at which mentored decoding sorts all tokens, sorts
    those that have mass, and looks for a solution without sorting; some rows need the sort after
    all, and top-k 1 leaves one token. A race opens few blocks of tokens first, and all where these
    do not suffice, as in flat distributions. Drawn and chosen tokens differ in q alone, so that
    one setting of mentored decoding has programs for both, and each other one has one of them.
    Sizes and truncations recur after twelve rounds."""
    maker = Counted()
    verification = CompiledVerifier(maker)
    truncations = [*TRUNCATIONS, {"top_k": 1}]
    for seed in range(12 * len(drawns)):
        rows, drawn = (1, 3)[seed % 2], drawns[seed // 12]
        settings: dict[str, Any] = {"num_drafted": 1 + seed % 4, **truncations[seed % 6]}
        temperature = 5.0 if seed % 6 == 0 else 0.8
        draft, *rest = case(rows, drawn, temperature, seed, V=num_tokens, **settings)
        if seed % 3:
            length_B1 = torch.arange(rows)[:, None] + seed
            draft = replace(draft, mask_BN=torch.arange(draft.num_nodes) <= length_B1 % 4)
        assert_same(verification(rule, draft, *rest), verify_eagerly(rule, draft, *rest))
    assert maker.graphs == len(drawns)
    assert verification.refused == []


def tree_case(rows: int, drawn: Any, seed: int, greedy: bool = False, **settings: Any) -> Any:
    """Trees of two children per node, three levels; of the last rows some nodes do not exist. Nodes
    with equal paths share a query token where children are independent draws."""
    chain, scores, context, rng = case(
        rows, "iid", 0.0 if greedy else 0.8, seed, 6, **({} if greedy else settings)
    )
    q_BNV = context.distribution(chain.probs_BNV.log(), None) if not greedy else chain.probs_BNV
    parents_BN = torch.tensor(TREE_SHAPE.parents).expand(rows, -1)
    above_BDV = q_BNV[:, parents_BN[0, 1:]].flatten(0, 1)
    generator = torch.Generator().manual_seed(seed)
    tokens_BD = torch.multinomial(above_BDV, 1, generator=generator).view(rows, -1)
    if drawn == "distinct":  # the second sibling is drawn from what is left
        for first, second in ((0, 1), (2, 3)):
            left_BV = q_BNV[:, parents_BN[0, first + 1]].scatter(1, tokens_BD[:, first, None], 0)
            tokens_BD[:, second] = (left_BV + 1e-12).argmax(1)
    tokens_BN = torch.cat([chain.tokens_BN[:, :1], tokens_BD], 1)
    mask_BN = torch.arange(7) < 7 - (torch.arange(rows)[:, None] + seed) % 4
    probs_BNV = None if drawn == "chosen" else q_BNV
    assert TREE_SHAPE.parents is not None
    draft = Draft.tree(TREE_SHAPE.parents, tokens_BN, mask_BN, probs_BNV, drawn, 4)
    queries, V = draft.query_tokens, scores.logits_BQV.shape[2]
    logits_BQV = scores.logits_BQV.gather(1, queries.node_BQ[..., None].expand(-1, -1, V))
    scores = Scores(logits_BQV, None, queries)
    return draft, scores, context, rng


TREE_SHAPE = TreeShape(7, 4, (-1, 0, 0, 1, 1, 2, 3))
TREE_RULES = [
    (Rejection(), "iid"),
    (Rejection(), "chosen"),
    (Distinct(), "distinct"),
    (SampleMatch(), "chosen"),
    (Coupled(), "distinct"),
    (Typical(), "chosen"),
    (Greedy(), "chosen"),
    (Mtad(0.3), "searched"),
    (Traversal(), "iid"),
    (Traversal(), "distinct"),
    (Traversal(), "chosen"),
]


@pytest.mark.parametrize(("rule", "drawn"), TREE_RULES, ids=str)
def test_programs_of_trees_reduce_no_truth_values(rule: Any, drawn: Any) -> None:
    """The C++ that torch 2.13 emits for it compiles only where vectors divide their number."""
    reduced = []

    def noting(module: nn.Module, trace: Any, own: bool) -> Program:
        aten = torch.ops.aten
        for node in traced(module, trace).graph.nodes:
            if node.target in (aten.any.dim, aten.max.dim, aten.amax.default):
                reduced.append(node.args[0].meta["val"].dtype)
        return untraced(module)

    verification = CompiledVerifier(noting, TREE_SHAPE)
    verification(rule, *tree_case(2, drawn, 0, rule.needs != "distribution"))
    assert torch.bool not in reduced


@pytest.mark.parametrize(("rule", "drawn"), TREE_RULES, ids=str)
def test_verdicts_over_trees_equal_those_of_the_rule(rule: Any, drawn: Any) -> None:
    """In 40 rounds of one or several rows, with every truncation."""
    maker = Counted()
    verification = CompiledVerifier(maker, TREE_SHAPE)
    for seed in range(40):
        truncation, greedy = TRUNCATIONS[seed % 5], rule.needs != "distribution"
        round_ = tree_case((1, 2, 5)[seed % 3], drawn, seed, greedy, **truncation)
        assert_same(verification(rule, *round_), verify_eagerly(rule, *round_), greedy)
    assert maker.graphs == 1
    assert maker.calls == 43
    other = CompiledVerifier(maker, TREE_SHAPE._replace(walk_length=5))
    assert_same(other(rule, *round_), verify_eagerly(rule, *round_), greedy)
    assert maker.graphs == 1, "trees of other shapes are verified eagerly"


def test_rules_that_do_not_walk_have_programs_for_many_siblings() -> None:
    """Those of the others would take each step of the longest walk."""
    shape = TreeShape(60, 59)
    kind, verification = DraftKind("chosen", shape), CompiledVerifier(Counted(), shape)
    can = {rule: verification.can_compile(rule, kind) for rule, _ in TREE_RULES}
    able = {rule for rule in can if can[rule]}
    assert able == {SampleMatch(), Coupled(), Greedy()}
    maker, shape = Counted(), TREE_SHAPE._replace(walk_length=40)
    verification = CompiledVerifier(maker, shape)
    for rule in sorted(able, key=str):
        greedy = rule.needs != "distribution"
        draft, *rest = tree_case(2, "chosen", 1, greedy)
        draft = replace(draft, max_walk_length=40)
        verdict = verification(rule, draft, *rest)
        assert_same(verdict, verify_eagerly(rule, draft, *rest), greedy)
    assert maker.graphs == 3


@pytest.mark.parametrize(
    ("rule", "drawn"),
    [(Rejection(), "iid"), (Distinct(), "distinct"), (Traversal(), "iid")],
    ids=str,
)
def test_programs_for_large_vocabularies_decide_as_the_rule(rule: Any, drawn: Any) -> None:
    """They compute the distributions that are read, in loops that end with the walk."""
    maker = Counted()
    verification = CompiledVerifier(maker, TREE_SHAPE)
    for seed in range(12):
        truncation = {} if drawn == "distinct" else TRUNCATIONS[seed % 5]
        round_ = tree_case((1, 2, 5)[seed % 3], drawn, seed, V=LOOPS_FROM, **truncation)
        assert_same(verification(rule, *round_), verify_eagerly(rule, *round_))
    assert maker.graphs == 1


def test_penalised_nodes_with_equal_paths_share_no_query_token() -> None:
    """Penalties change the logits of each node, so a program reads those of all nodes."""
    maker = Counted()
    verification = CompiledVerifier(maker, TREE_SHAPE)
    for seed in range(6):
        round_ = tree_case(2, "iid", seed)
        context = round_[2]
        context.distribution = Warp([Sampling(repetition_penalty=1.3)] * 2, V)
        assert_same(verification(Rejection(), *round_), verify_eagerly(Rejection(), *round_))
    assert maker.calls == 6 + 3


def test_rules_that_compute_by_node_have_a_program_per_shape() -> None:
    """Other rules share theirs among all trees of a size."""
    draft, *rest = tree_case(2, "iid", 0)
    parents = (-1, 0, 0, 1, 1, 2, 2)
    other = Draft.tree(parents, draft.tokens_BN, draft.mask_BN, draft.probs_BNV, "iid", 4)
    unknown = replace(draft, mask_BN=draft.mask_BN)
    for rule, num_graphs in ((Traversal(), 1), (Rejection(), 3)):
        maker = Counted()
        verification = CompiledVerifier(maker, TREE_SHAPE)
        calls = []
        for each in (draft, other, unknown):
            assert_same(verification(rule, each, *rest), verify_eagerly(rule, each, *rest))
            calls.append(maker.calls)
        assert maker.graphs == 1
        assert len(set(calls)) == num_graphs, "trees of other shapes are verified eagerly"


@pytest.mark.parametrize("temperature", [0.8, 3.0])
def test_verdicts_over_sequences_equal_those_of_the_rule(temperature: float) -> None:
    """K-SEQ over three sequences of three tokens, equal prefixes repeated, some cut short."""
    maker = Counted()
    verification = CompiledVerifier(maker, TreeShape(10, 5))
    for seed in range(24):
        rows, truncation = (1, 2, 5)[seed % 3], TRUNCATIONS[seed % 5]
        chain, scores, context, rng = case(rows, "iid", temperature, seed, 9, **truncation)
        q_BNV = context.distribution(chain.probs_BNV.log(), None)
        parents_BN = torch.tensor([-1, 0, 0, 0, 1, 2, 3, 4, 5, 6]).expand(rows, -1)
        q_BNV[:, 2:4], q_BNV[:, 5:7] = q_BNV[:, 1:2], q_BNV[:, 4:5]
        above_XV = q_BNV[:, parents_BN[0, 1:]].flatten(0, 1)
        generator = torch.Generator().manual_seed(seed)
        tokens_BD = torch.multinomial(above_XV, 1, generator=generator).view(rows, -1)
        tokens_BD[:, 1::3] = tokens_BD[:, ::3]  # the second sequence equals the first one
        tokens_BN = torch.cat([chain.tokens_BN[:, :1], tokens_BD], 1)
        mask_BN = torch.arange(10) < 10 - (torch.arange(rows)[:, None] + seed) % 4
        draft = Draft(tokens_BN, parents_BN, mask_BN, q_BNV, "iid", max_walk_length=5)
        round_ = draft, scores, context, rng
        assert_same(verification(Spectr(), *round_), verify_eagerly(Spectr(), *round_))
    assert (maker.graphs, maker.calls) == (1, 27)


def test_programs_of_rules_for_sequences_refuse_other_trees() -> None:
    verification = CompiledVerifier(made, TREE_SHAPE)
    with pytest.raises(IncompatibleError, match="branch only at the root"):
        verification(Spectr(), *tree_case(1, "iid", 0))


def test_every_traceable_rule_is_covered() -> None:
    public = (getattr(verifiers, name) for name in verifiers.__all__)
    traceable = {rule for rule in public if vars(rule).get("traceable")}
    rules = [*DISTRIBUTIONS, *DRAWN, *LOGITS, *OF_BOTH_LOGITS, *(rule for rule, _ in TREE_RULES)]
    rules += [*(rule for rule, *_ in SOLVED), Spectr()]
    assert traceable == {type(rule) for rule in rules}


@pytest.mark.parametrize("rule", [Joint(quantity="step"), Joint(distributions="raw")], ids=repr)
def test_rules_that_need_more_than_distributions_verify_eagerly(rule: Any) -> None:
    maker = Counted()
    draft, *rest = case(2, "searched", with_logits=True)
    shares_BN = torch.full(draft.tokens_BN.shape, 0.5)
    draft = replace(draft, step_probs_BN=shares_BN)
    assert_same(CompiledVerifier(maker)(rule, draft, *rest), verify_eagerly(rule, draft, *rest))
    assert maker.graphs == 0


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


def test_statistics_of_shared_noise_are_equal() -> None:
    """A coupled draft carries the probabilities of its tokens, which the program reads."""
    plain = engine_of(tiny(), tiny(seed=1), "coupled", γ=γ, max_batch_size=2)
    wanted = plain.generate(ragged_prompts([9, 4]), SAMPLED)
    engine = engine_of(tiny(), tiny(seed=1), "coupled", γ=γ, max_batch_size=2)
    maker = Counted()
    engine.verification = CompiledVerifier(maker)
    found = engine.generate(ragged_prompts([9, 4]), SAMPLED)
    assert token_ids(found) == token_ids(wanted)
    assert (maker.graphs, maker.calls > 5) == (1, True)
    for one, other in zip(found, wanted, strict=True):
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)


def verifying(**settings: Any) -> tuple[Engine, Counted]:
    """An engine with fused verification, and the compiler of its programs."""
    engine = engine_of(tiny(), tiny(seed=1), γ=γ, **settings)
    maker = Counted()
    engine.verification = CompiledVerifier(maker)
    return engine, maker


class Halving:
    """A processor that is compared by identity, as users' are."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores / 2


PROCESSED: list[dict[str, Any]] = [
    {"repetition_penalty": 1.2, "presence_penalty": 0.3, "frequency_penalty": -0.2},
    {"logit_bias": {3: 2.0, 5: -torch.inf}},
    {"logit_bias": {3: 1e38, 4: 3e38}, "temperature": 0.5},
    {"forced": {1: 7}},
    {"processors": (Halving(),)},
]


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("settings", PROCESSED, ids=lambda each: next(iter(each)))
def test_distributions_that_depend_on_more_than_logits_are_verified_by_the_same_program(
    settings: dict[str, Any], temperature: float
) -> None:
    sampling = replace(SAMPLED, temperature=temperature, max_new_tokens=16)
    sampling = replace(
        sampling, **(settings | {"temperature": temperature} if not temperature else settings)
    )
    prompts = ragged_prompts([9, 4])
    plain = replace(SAMPLED, temperature=temperature)
    engine, maker = verifying(max_batch_size=2)
    engine.generate(prompts, plain)
    found = engine.generate(prompts, sampling)
    wanted = engine_of(tiny(), tiny(seed=1), γ=γ, max_batch_size=2).generate(prompts, sampling)
    assert token_ids(found) == token_ids(wanted)
    assert maker.graphs == 1
    for one, other in zip(found, wanted, strict=True):
        assert one.stats.alpha == pytest.approx(other.stats.alpha, abs=1e-5)


@pytest.mark.parametrize("governed", [False, True])
def test_plain_and_governed_rounds_without_drafts_have_a_program(governed: bool) -> None:
    kind, maker = DraftKind("chosen", root_only=True), Counted()
    draft, γ = (tiny(seed=1), "auto") if governed else (None, 4)
    wanted, found = (engine_of(tiny(), draft, γ=γ) for _ in range(2))  # type: ignore[arg-type]
    found.verification = CompiledVerifier(maker)
    what = [stage.what for stage in programs_of(found)]
    assert f"rule {type(found.recipe.verifier).__name__} without drafts" in what
    warm_up(found)
    programs = found.verification._programs.items()
    assert [made for (*_, of), made in programs if of == kind and made is not None]
    calls, prompts = maker.calls, ragged_prompts([9, 4])
    results = found.generate(prompts, SAMPLED), wanted.generate(prompts, SAMPLED)
    assert maker.calls > calls
    if not governed:  # its drafts depend on times
        assert token_ids(results[0]) == token_ids(results[1])


def test_a_batch_of_greedy_and_sampled_rows_has_one_program() -> None:
    prompts, samplings = ragged_prompts([9, 4, 6]), [SAMPLED, greedy(20), SAMPLED]
    engine, maker = verifying(max_batch_size=3)
    found = engine.generate(prompts, samplings)
    wanted = engine_of(tiny(), tiny(seed=1), γ=γ, max_batch_size=3).generate(prompts, samplings)
    assert token_ids(found) == token_ids(wanted)
    assert maker.graphs <= 2  # the last rows may all be greedy


def test_dead_ends_are_reported() -> None:
    """A processor that leaves no token ends the row with an error, as in eager verification."""
    sampling = replace(SAMPLED, processors=(lambda ids, scores: scores - torch.inf,))
    engine, _ = verifying()
    with pytest.raises(OutriderError) as found:
        engine.generate(ragged_prompts([9]), sampling)
    with pytest.raises(OutriderError) as wanted:
        engine_of(tiny(), tiny(seed=1), γ=γ).generate(ragged_prompts([9]), sampling)
    assert str(found.value) == str(wanted.value)


@pytest.mark.parametrize("rule", [Block(), Lenience(0.4), Typical()], ids=repr)
def test_the_divergence_of_lossy_rules_is_still_measured(rule: Any) -> None:
    wanted = engine_of(tiny(), tiny(seed=1), verifier=rule).generate(ragged_prompts([9]), SAMPLED)
    engine, maker = verifying(verifier=rule)
    found = engine.generate(ragged_prompts([9]), SAMPLED)
    assert token_ids(found) == token_ids(wanted)
    assert found.stats.kl == pytest.approx(wanted.stats.kl, rel=1e-4, abs=1e-6)
    assert maker.graphs == 1


def test_exact_models_are_verified_eagerly_when_sampling() -> None:
    """A compiled softmax may round differently from torch's; an argmax cannot."""
    maker = Counted()
    verification = CompiledVerifier(maker, exact=True)
    verification(Rejection(), *case(1, "iid"))
    assert maker.graphs == 0
    verification(Greedy(), *case(1, "chosen", 0.0))
    assert maker.graphs == 1


def test_drafts_of_more_nodes_than_programs_take_are_verified_eagerly() -> None:
    maker = Counted()
    verification = CompiledVerifier(maker)
    for num, graphs in ((MOST_NODES, 0), (MOST_NODES - 1, 1), (NUM_PER_ROLE + 1, 1)):
        round_ = case(2, "iid", num_drafted=num)
        wanted = verify_eagerly(Rejection(), *round_)
        assert_same(verification(Rejection(), *round_), wanted)
        assert maker.graphs == graphs


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
        *decided, p_BNV, reached_BD, overlap_BD = interpreted(module, trace)(inputs)
        return [*decided, 1.001 * p_BNV, reached_BD, overlap_BD]

    return graph


def lying(module: nn.Module, trace: Any, own: bool) -> Program:
    return lambda inputs: [*interpreted(module, trace)(inputs)[:1], *[inputs[1][:, 0]] * 6]


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
    verification = CompiledVerifier(maker)
    round_ = case(1, "iid")
    with pytest.warns(OutriderWarning, match=text) as caught:
        found = verification(rule, *round_)
    assert len(caught) == 1
    assert torch.equal(found.emitted_BK, verify_eagerly(rule, *round_).emitted_BK)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        verification(rule, *round_)


def test_each_rule_and_vocabulary_has_its_own_cache_key() -> None:
    """A program is compiled for these sizes and looked up by this key."""
    names = []

    def named(module: nn.Module, trace: Any, own: bool) -> Program:
        names.append(str(dependencies(module)))
        return untraced(module)

    for logits_BNV in (
        torch.zeros(1, γ + 1, V),
        torch.zeros(1, γ + 1, V + 1),
    ):
        verification = CompiledVerifier(named)
        for rule in (Rejection(), Lenience(0.4), Lenience(0.5)):
            verification.warm_up(rule, DraftKind("iid"), logits_BNV)
            verification.warm_up(rule, DraftKind("chosen"), logits_BNV)
        verification.warm_up(Greedy(), DraftKind("chosen"), logits_BNV)
    assert len(names) == len(set(names)) == 14


@pytest.mark.skipif(find_compiler() is None, reason="no C++ compiler")
@pytest.mark.slow
@pytest.mark.parametrize("rule", [Rejection(), Greedy(), Mentored(0.1), Coupled()], ids=repr)
def test_compiled_verdicts_equal_those_of_the_rule(rule: Any) -> None:
    """With the kernels, and for as many tokens as ``test_a_compiled_demo`` has, so that one of the
    two finds the programs of the other in the cache folder."""
    use_kernels(nn.Linear(8, 8))  # which tells the tracer of them, too
    verification, V = CompiledVerifier(compiled_program), COMPILED["vocab_size"]
    with warnings.catch_warnings():
        warnings.simplefilter("error", OutriderWarning)
        drawn: Any = "iid" if rule.needs == "distribution" else "chosen"
        verification.warm_up(rule, DraftKind(drawn), torch.zeros(1, γ + 1, V))
    for seed in range(30):
        by_distribution = rule.needs == "distribution"
        drawn, temperature = ("iid", 0.8) if by_distribution else ("chosen", 0.0)
        round_ = case(1 + seed % 3, drawn, temperature, seed, V=V, **TRUNCATIONS[seed % 5])
        found, wanted = verification(rule, *round_), verify_eagerly(rule, *round_)
        assert torch.equal(found.verdict.num_accepted_B, wanted.verdict.num_accepted_B)
        assert torch.equal(found.verdict.next_token_B, wanted.verdict.next_token_B)
    assert verification._last is not None
    assert verification._last[2] is not None

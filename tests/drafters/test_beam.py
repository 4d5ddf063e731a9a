"""Beam search drafts: against a plain search, the distribution of sampled beams, and the cache.

Legend: B rows, N nodes, n beams, V vocabulary.
"""

import math
import warnings
from collections.abc import Iterator
from itertools import permutations
from typing import get_args

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, full_logits, ragged_prompts, tiny
from torch import Tensor

from outrider import Sampling
from outrider.core import Budget, Context, Distribution, Lengths, Prefix, Role, check_compatible
from outrider.core.errors import IncompatibleError, InvalidParameterError, OutriderWarning
from outrider.drafters import ModelDrafter
from outrider.drafters.search import beam as beam_module
from outrider.drafters.search import steps as steps_module
from outrider.drafters.search.beam import BeamDrafter, MjgdDrafter, Search
from outrider.drafters.search.beam_tree import BeamTree
from outrider.drafters.search.steps import Step
from outrider.runtime import HFModel
from outrider.sampling import Warp
from outrider.testing import SoftmaxDistribution, check_drafter, chi2_p_value
from outrider.verifiers import Block, Rejection
from outrider.verifiers.commit import Commit

SETTINGS = {
    "joint greedy": Sampling(temperature=0, repetition_penalty=1.4),
    "warped": Sampling(temperature=0.7, top_k=30, top_p=0.9, frequency_penalty=0.6),
    "two tokens": Sampling(temperature=0.9, top_k=2),
}

ATOL = (
    1e-5  # gemma computes parts in float32, whatever the dtype, and mixtral's experts know no other
)

Path = tuple[int, ...]


def toy(seed: int, num_tokens: int, std: float = 0.25, **settings: int) -> HFModel:
    return tiny("llama", seed, dtype=torch.float64, vocab_size=num_tokens, std=std, **settings)


def start(prompts: list[list[int]], sampling: Sampling, num_tokens: int = VOCAB) -> Context:
    B = len(prompts)
    return Context.start(prompts, Warp([sampling] * B, num_tokens), [0] * B, range(B))


def distribution_behind(
    model: HFModel, prompt: list[int], path: Path, sampling: Sampling
) -> Tensor:
    """The distribution of the next token from a plain pass over everything before it, (V,)."""
    context = start([prompt], sampling, model.num_tokens)
    context.append(torch.tensor([path], dtype=torch.int64), Lengths.of([len(path)]))
    logits_11V = full_logits(model.module, [*prompt, *path])[None, -1:]
    prefix = Prefix.of_chain(context, [])
    if sampling.greedy:
        return context.distribution.logits(logits_11V, prefix).softmax(-1)[0, 0]
    return context.distribution(logits_11V, prefix)[0, 0]


def plain_search(
    model: HFModel,
    prompt: list[int],
    sampling: Sampling,
    beams: int,
    num_steps: int,
    u_iR: Tensor | None = None,
    copies: int = 1,
) -> Iterator[list[tuple[Path, float]]]:
    """The beams after each step, best first, with a full pass for every path.

    With random numbers, a step keeps the best of the continuations that they draw, by inverse CDF.
    """
    living: list[tuple[Path, float]] = [((), 0.0)] * copies
    for i in range(num_steps):
        found = continuations(model, prompt, sampling, living)
        if u_iR is not None:
            left, drawn = list(found), []
            for u in u_iR[i].tolist()[: len(found)]:
                cdf = torch.tensor([score for _, score in left]).double().exp().cumsum(0)
                drawn.append(left.pop(int((cdf <= u * cdf[-1]).sum())))
            found = drawn
        living = sorted(found, key=lambda beam: -beam[1])[:beams]
        yield living


def continuations(
    model: HFModel, prompt: list[int], sampling: Sampling, living: list[tuple[Path, float]]
) -> list[tuple[Path, float]]:
    """Every beam with every possible token, and their scores."""
    return [
        ((*path, x), score + log_q)
        for path, score in living
        for x, log_q in enumerate(distribution_behind(model, prompt, path, sampling).log().tolist())
        if log_q > -torch.inf
    ]


def living_beams(step: Step, row: int) -> list[tuple[Path, float]]:
    scores = step.score_Bn[row].tolist()
    paths = [tuple(step.tree.tokens_BM[row][path].tolist()) for path in step.tree.path_BnK[row]]
    return [(p, s) for p, s in zip(paths, scores, strict=True) if s > -torch.inf]


def check_against_plain(family: str, sampling: Sampling, beams: int, lengths: list[int]) -> None:
    """Compares all beams of all steps, their scores, and the draft made of them."""
    model = tiny(family, 3, dtype=torch.float32 if family == "mixtral" else torch.float64)
    prompts, γ = ragged_prompts(lengths, seed=1), 4
    joint = sampling.greedy  # whose drafts are one token longer than the budget
    drafter = (
        MjgdDrafter(model, VOCAB, beams) if joint else BeamDrafter(model, VOCAB, beams, "greedy")
    )
    context = start(prompts, sampling)
    budget = Budget(γ - joint, torch.tensor([γ - joint - b for b in range(len(lengths))]))
    with torch.inference_mode():
        steps = list(drafter.steps(drafter.start(context), context, γ, context.rng))
        draft = drafter.propose(drafter.start(context), context, budget, context.rng)
    assert draft.probs_BNV is not None
    for row, prompt in enumerate(prompts):
        plain = list(plain_search(model, prompt, sampling, beams, γ))
        for mine, theirs in zip(steps, plain, strict=True):
            found = living_beams(mine, row)
            assert [path for path, _ in found] == [path for path, _ in theirs]
            assert [s for _, s in found] == pytest.approx([s for _, s in theirs], abs=ATOL)
        (best, score), num = plain[γ - row - 1][0], γ - row
        assert tuple(draft.tokens_BN[row][draft.mask_BN[row]].tolist()[1:]) == best
        q_DV = draft.probs_BNV[row, :num]
        along = [distribution_behind(model, prompt, best[:i], sampling) for i in range(num)]
        assert torch.allclose(q_DV, torch.stack(along), rtol=0, atol=ATOL)
        q_D = q_DV.gather(1, torch.tensor(best)[:, None])
        assert float(q_D.log().sum()) == pytest.approx(score, abs=ATOL)


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma2", "mistral"])
def test_greedy_search_is_the_plain_search(family: str, setting: str) -> None:
    """Rows of different lengths and budgets; sliding windows; penalties on each beam's own path."""
    check_against_plain(family, SETTINGS[setting], 4, [6, 13, 1])


@pytest.mark.slow
@pytest.mark.parametrize("family", sorted(set(FAMILIES) - {"llama", "gpt2", "gemma2", "mistral"}))
def test_greedy_search_is_the_plain_search_in_every_family(family: str) -> None:
    check_against_plain(family, SETTINGS["warped"], 8, [10, 2])


class NotReordered(BeamTree):
    """Wrong: paths are not reordered with the beams, as in the authors' code."""

    def grown(self, beam_Bn: Tensor, token_Bn: Tensor) -> BeamTree:
        place_n = torch.arange(beam_Bn.shape[1]) % self.path_BnK.shape[1]
        done = super().grown(place_n.expand_as(beam_Bn), token_Bn)
        return NotReordered(done.tokens_BM, done.path_BnK, done.depth_M)


def test_beams_that_are_not_reordered_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_module, "BeamTree", NotReordered)
    with pytest.raises(AssertionError):
        check_against_plain("llama", SETTINGS["joint greedy"], 4, [6])


def check_shares(drafter: BeamDrafter, rows: range) -> None:
    """Each path's share of the probability that its step chose from, by full passes."""
    prompts, γ, sampling = ragged_prompts([6, 2]), 4, SETTINGS["warped"]
    context = start(prompts, sampling)
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, Budget(γ), context.rng)
        steps = list(drafter.steps(drafter.start(context), context, γ, context.rng))
    assert draft.step_probs_BN is not None
    assert draft.step_probs_BN[:, 0].tolist() == [1.0, 1.0]
    copies = drafter.beams if drafter.search == "copies" else 1
    for row in rows:
        before: list[tuple[Path, float]] = [((), 0.0)] * copies
        path = tuple(draft.tokens_BN[row, 1:].tolist())
        for i, step in enumerate(steps):
            found = continuations(drafter.model, prompts[row], sampling, before)
            total = sum(math.exp(score) for _, score in found)
            mine = next(math.exp(score) for p, score in found if p == path[: i + 1])
            assert float(draft.step_probs_BN[row, i + 1]) == pytest.approx(mine / total, rel=1e-6)
            before = living_beams(step, row)


@pytest.mark.parametrize("search", get_args(Search))
def test_shares_of_the_steps(search: Search) -> None:
    check_shares(BeamDrafter(tiny(dtype=torch.float64), VOCAB, 3, search), range(2))


def test_shares_of_another_step_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: shares of the beams after the step, not of those before it."""
    right = steps_module.Step

    def wrong(q: Tensor, z: Tensor, total_B: Tensor, tree: BeamTree, score_Bn: Tensor) -> Step:
        return right(q, z, score_Bn.logsumexp(1), tree, score_Bn)

    monkeypatch.setattr(steps_module, "Step", wrong)
    with pytest.raises(AssertionError):
        check_shares(BeamDrafter(tiny(dtype=torch.float64), VOCAB, 3), range(2))


def test_logits_are_handed_over_where_a_rule_reads_them() -> None:
    """The model's own, before temperature and truncation."""
    model, prompts = tiny(dtype=torch.float64), ragged_prompts([6, 2])
    context = start(prompts, SETTINGS["warped"])
    for keep_logits in (True, False):
        drafter = BeamDrafter(model, VOCAB, 3, keep_logits=keep_logits)
        with torch.inference_mode():
            draft = drafter.propose(drafter.start(context), context, Budget(3), context.rng)
        assert (draft.logits_BNV is not None) == keep_logits
        if draft.logits_BNV is not None:
            for row, prompt in enumerate(prompts):
                text = [*prompt, *draft.tokens_BN[row, 1:-1].tolist()]
                own_DV = full_logits(model.module, text)[len(prompt) - 1 :]
                assert torch.allclose(draft.logits_BNV[row, :3], own_DV, rtol=0, atol=ATOL)


@pytest.mark.parametrize("search", get_args(Search))
def test_contract(search: Search) -> None:
    """Well-formed drafts within budget; a row alone drafts as in a batch, also after commits, keep
    and join."""

    def distribution(num_rows: int) -> Distribution:
        sampling = Sampling(temperature=0.8, frequency_penalty=0.3, logit_bias={0: 0.5})
        return Warp([sampling] * num_rows, 6)

    with torch.inference_mode():
        check_drafter(BeamDrafter(toy(1, 6), 6, 3, search), 6, distribution=distribution)


@pytest.mark.parametrize(("beams", "search"), [(1, "greedy"), (5, "greedy"), (5, "sample")])
def test_at_temperature_zero_it_is_the_greedy_chain(beams: int, search: str) -> None:
    """Also for a row among rows that sample."""
    model, prompts = tiny("llama", 1), ragged_prompts([5, 9, 2])
    context = start(prompts, Sampling(temperature=0))
    drafter = BeamDrafter(model, VOCAB, beams, search)
    with torch.inference_mode():
        chain, draft = (
            d.propose(d.start(context), context, Budget(6), context.rng)
            for d in (ModelDrafter(model, VOCAB), drafter)
        )
        samplings = [Sampling(temperature=0), Sampling(), Sampling(temperature=0)]
        context.distribution = Warp(samplings, VOCAB)
        mixed = drafter.propose(drafter.start(context), context, Budget(6), context.rng)
    assert torch.equal(draft.tokens_BN, chain.tokens_BN)
    assert torch.equal(mixed.tokens_BN[::2], chain.tokens_BN[::2])


def test_one_beam_is_the_greedy_chain_at_any_temperature() -> None:
    model = tiny("llama", 1)
    greedy, sampled = (start(ragged_prompts([5, 9]), Sampling(temperature=t)) for t in (0, 0.7))
    drafter, chain = BeamDrafter(model, VOCAB, 1, "greedy"), ModelDrafter(model, VOCAB)
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(sampled), sampled, Budget(6), sampled.rng)
        other = chain.propose(chain.start(greedy), greedy, Budget(6), greedy.rng)
    assert torch.equal(draft.tokens_BN, other.tokens_BN)


def exact_distribution(
    model: HFModel, prompt: list[int], beams: int, num_steps: int, sampling: Sampling
) -> dict[Path, float]:
    """The distribution of the best beam: the sum over all orders of the 2B draws."""
    states: dict[tuple[tuple[Path, float], ...], float] = {(((), 0.0),): 1.0}
    for _ in range(num_steps):
        after: dict[tuple[tuple[Path, float], ...], float] = {}
        for living, mass in states.items():
            found = continuations(model, prompt, sampling, list(living))
            weights = torch.tensor([score for _, score in found]).double().exp().tolist()
            for order in permutations(range(len(found)), min(2 * beams, len(found))):
                chance, left = mass, sum(weights)
                for x in order:
                    chance *= weights[x] / left
                    left -= weights[x]
                drawn = sorted((found[x] for x in order), key=lambda beam: -beam[1])
                kept = tuple(drawn[:beams])
                after[kept] = after.get(kept, 0.0) + chance
        states = after
    distribution: dict[Path, float] = {}
    for living, mass in states.items():
        distribution[living[0][0]] = distribution.get(living[0][0], 0.0) + mass
    return distribution


@pytest.mark.parametrize(
    ("beams", "search"), [(1, "sample"), (3, "sample"), (8, "sample"), (4, "copies")]
)
@pytest.mark.parametrize("setting", ["warped", "two tokens", "all tokens"])
def test_sampled_search_is_the_plain_search_with_the_same_numbers(
    setting: str, beams: int, search: Search
) -> None:
    """Draw by draw. (ENUM cannot follow it: a draft does not show which beams were dropped.)"""
    model, sampling = tiny("llama", 3, dtype=torch.float64), SETTINGS.get(setting, Sampling())
    prompts, γ = ragged_prompts([6, 1], seed=1), 4
    context = start(prompts, sampling)
    drafter, copies = BeamDrafter(model, VOCAB, beams, search), search == "copies"
    u_BiR = context.rng.uniform(Role.DRAFT, γ * 2 * beams).unflatten(1, (γ, -1))
    with torch.inference_mode():
        steps = list(drafter.steps(drafter.start(context), context, γ, context.rng))
    for row, prompt in enumerate(prompts):
        first = beams if copies else 1
        plain = plain_search(model, prompt, sampling, beams, γ, u_BiR[row], first)
        for mine, theirs in zip(steps, plain, strict=True):
            found = living_beams(mine, row)
            assert [path for path, _ in found] == [path for path, _ in theirs]
            assert [s for _, s in found] == pytest.approx([s for _, s in theirs], abs=ATOL)


def sampled_p_value(num_tokens: int, beams: int, num_steps: int, num_rows: int) -> float:
    """p-value of the best beams of many requests with one prompt."""
    model = toy(1, num_tokens, num_hidden_layers=1, std=0.15)
    prompt, sampling = [1], Sampling()
    distribution = exact_distribution(model, prompt, beams, num_steps, sampling)
    cells = {path: i for i, path in enumerate(distribution)}
    drafter = BeamDrafter(model, num_tokens, beams)
    counts_C = torch.zeros(len(cells) + 1)
    for first in range(0, num_rows, 10_000):
        numbers = range(first, first + 10_000)
        context = Context.start([prompt] * 10_000, SoftmaxDistribution(), [7] * 10_000, numbers)
        with torch.inference_mode():
            draft = drafter.propose(drafter.start(context), context, Budget(num_steps), context.rng)
        paths, counts = draft.tokens_BN[:, 1:].unique(dim=0, return_counts=True)
        for path, count in zip(paths.tolist(), counts.tolist(), strict=True):
            counts_C[cells.get(tuple(path), -1)] += count
    return chi2_p_value(counts_C, torch.tensor([*distribution.values(), 0.0]))


@pytest.mark.slow
@pytest.mark.parametrize(("num_tokens", "beams"), [(3, 2), (3, 1), (5, 2)])
def test_sampled_beams_by_frequency(num_tokens: int, beams: int) -> None:
    """CHI2 over 200,000 drafts of two tokens; a right search fails with probability 1e-4 in each
    of the three cases (seed fixed)."""
    assert sampled_p_value(num_tokens, beams, 2, 200_000) > 1e-4


def first_drawn(score_Bn: Tensor, q_BnV: Tensor, k: int, u_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: the first B draws are kept, not the best."""
    return steps_module.sampled(score_Bn, q_BnV, k, u_BR[:, :k])


def last_step_only(score_Bn: Tensor, q_BnV: Tensor, k: int, u_BR: Tensor) -> tuple[Tensor, Tensor]:
    """Wrong: beams are verified by their last token alone."""
    alive_Bn = score_Bn.clamp(-1e-9, 0)
    return steps_module.sampled(alive_Bn, q_BnV, k, u_BR)


@pytest.mark.parametrize("wrong", [first_drawn, last_step_only])
def test_wrong_searches_are_rejected_by_frequency(
    wrong: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    right = steps_module.sampled

    def mutant(*arguments: object) -> object:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(steps_module, "sampled", right)
            return wrong(*arguments)  # type: ignore[operator]

    monkeypatch.setattr(steps_module, "sampled", mutant)
    assert sampled_p_value(3, 2, 2, 20_000) < 1e-12


@pytest.mark.parametrize("search", ["sample", "greedy"])
def test_more_beams_than_tokens(search: str) -> None:
    """Three tokens have 3, then 9 paths. A search of width 8 keeps 8 of them, or as many as top-k
    leaves; all differ, and all scores are finite."""
    model = toy(1, 3)
    for top_k, numbers in ((None, [3, 8, 8]), (1, [1, 1, 1]), (2, [2, 4, 8])):
        drafter = BeamDrafter(model, 3, 8, search)
        context = start([[0, 1], [2]], Sampling(top_k=top_k or 0), 3)
        with torch.inference_mode():
            steps = list(drafter.steps(drafter.start(context), context, 3, context.rng))
            draft = drafter.propose(drafter.start(context), context, Budget(3), context.rng)
        for row in range(2):
            beams = [living_beams(step, row) for step in steps]
            assert [len(living) for living in beams] == numbers
            assert [len({path for path, _ in living}) for living in beams] == numbers
            assert tuple(draft.tokens_BN[row, 1:].tolist()) == beams[-1][0][0]


@pytest.mark.parametrize("search", ["sample", "greedy"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_cache_holds_what_was_accepted(temperature: float, search: str) -> None:
    """After any rounds the state drafts the same as a fresh one."""
    target, drafter = tiny(seed=0), BeamDrafter(tiny(seed=0), VOCAB, 4, search)
    context = start(ragged_prompts([5, 11]), Sampling(temperature=temperature))
    with torch.inference_mode():
        cache, state = target.start(context), drafter.start(context)
        for γ in (3, 0, 1, 5, 0, 0, 2):
            draft = drafter.propose(state, context, Budget(γ), context.rng)
            fresh = drafter.propose(drafter.start(context), context, Budget(γ), context.rng)
            assert torch.equal(draft.tokens_BN, fresh.tokens_BN)
            scores = target.score(cache, draft)
            verdict = Commit()(draft, scores.logits_BNV, context.rng).read()
            target.commit(cache, draft, verdict)
            drafter.commit(state, draft, verdict, scores)
            context.append(verdict.emitted(draft), verdict.num_emitted)
    assert context.lengths == [5 + 14, 11 + 14]


def test_one_pass_per_step_for_all_beams_and_rows() -> None:
    model = tiny(seed=0)
    drafter = BeamDrafter(model, VOCAB, 8)
    context = start(ragged_prompts([5, 11, 2]), Sampling())
    shapes: list[tuple[int, ...]] = []

    def note(module: torch.nn.Module, inputs: object, settings: dict[str, Tensor]) -> None:
        shapes.append(tuple(settings["input_ids"].shape))

    with torch.inference_mode():
        state = drafter.start(context)
        model.module.register_forward_pre_hook(note, with_kwargs=True)
        drafter.propose(state, context, Budget(4), context.rng)
    assert shapes == [(3, 1), (3, 8), (3, 8), (3, 8)]


def test_a_wide_search_at_the_contexts_end() -> None:
    """Seven steps of 60 beams lie in more slots than the context and its margin have."""
    model, sampling = tiny("llama", 0, dtype=torch.float64), Sampling(temperature=0)
    (prompt,) = ragged_prompts([120])
    drafter = MjgdDrafter(model, VOCAB, 60)
    context = start([prompt], sampling)
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, Budget(6), context.rng)
    *_, last = plain_search(model, prompt, sampling, 60, 7)
    assert tuple(draft.tokens_BN[0, 1:].tolist()) == last[0][0]


def test_joint_greedy_decoding_drafts_the_last_token_too() -> None:
    drafter = MjgdDrafter(tiny(seed=0), VOCAB, 4)
    context = start(ragged_prompts([5, 11, 2]), Sampling(temperature=0))
    budget = Budget(3, torch.tensor([3, 0, 1]))
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, budget, context.rng)
    assert draft.num_drafted_B.tolist() == [4, 1, 2]


def narrow_context(top_k: int) -> Context:
    return start([[0, 1], [2]], Sampling(top_k=top_k), 3)


def test_greedy_searches_have_one_beam_without_a_warning() -> None:
    """Also where a rule reads logits, so that they are searched as others are."""
    model, sampling = toy(1, 3), Sampling(temperature=0)
    for keep_logits in (False, True):
        drafter = BeamDrafter(model, 3, 3, keep_logits=keep_logits)
        context = start([[0, 1], [2]], sampling, 3)
        with warnings.catch_warnings(), torch.inference_mode():
            warnings.simplefilter("error")
            for _ in range(2):
                drafter.propose(drafter.start(context), context, Budget(2), context.rng)


def test_a_narrow_search_warns_once_in_the_next_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """Top-k leaves two tokens for three beams. After the warning nothing is read any more."""
    drafter, context = BeamDrafter(toy(1, 3), 3, 3), narrow_context(2)
    looks: list[Tensor] = []
    look = Tensor.__int__
    monkeypatch.setattr(Tensor, "__int__", lambda x: looks.append(x) or look(x))  # type: ignore[func-returns-value]

    def propose() -> None:
        with torch.inference_mode():
            drafter.propose(drafter.start(context), context, Budget(2), context.rng)

    with warnings.catch_warnings():
        warnings.simplefilter("error")
        propose()  # the device is not asked in the round itself
    assert not looks
    with pytest.warns(OutriderWarning, match="beams=3: a search found only 2, as .* top-k"):
        propose()
    assert len(looks) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        propose()
        propose()
    assert len(looks) == 1


@pytest.mark.parametrize(("top_k", "temperature", "beams"), [(0, 1.0, 3), (2, 1.0, 2), (0, 0.0, 3)])
def test_a_search_of_full_width_does_not_warn(top_k: int, temperature: float, beams: int) -> None:
    """Nor does a search at temperature 0, which has one beam by design."""
    sampling = Sampling(temperature=temperature, top_k=top_k)
    drafter, context = BeamDrafter(toy(1, 3), 3, beams), start([[0, 1], [2]], sampling, 3)
    with torch.inference_mode(), warnings.catch_warnings():
        warnings.simplefilter("error")
        for _ in range(3):
            drafter.propose(drafter.start(context), context, Budget(2), context.rng)


@pytest.mark.parametrize("bad", [0, -1, 2.0, True])
def test_a_bad_number_of_beams_is_named(bad: object) -> None:
    with pytest.raises(InvalidParameterError, match="beams="):
        BeamDrafter(tiny(), VOCAB, bad)  # type: ignore[arg-type]


def test_a_bad_search_is_named() -> None:
    with pytest.raises(InvalidParameterError, match="search='best'"):
        BeamDrafter(tiny(), VOCAB, 2, "best")  # type: ignore[arg-type]


def test_rules_for_draws_do_not_accept_it() -> None:
    drafter = BeamDrafter(tiny(), VOCAB, 2)
    for rule in (Rejection(), Block()):
        with pytest.raises(IncompatibleError, match="cannot verify 'searched'"):
            check_compatible(drafter, rule)
    check_compatible(drafter, Commit())

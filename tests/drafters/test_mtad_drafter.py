"""MTAD's tree: the beams of all steps, their parents, and their distributions."""

from dataclasses import replace

import pytest
import torch
from test_beam import SETTINGS, distribution_behind, living_beams, start, toy
from tiny_models import VOCAB, ragged_prompts, tiny

from outrider import Sampling
from outrider.core import Budget, Distribution, Draft, check_compatible
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.drafters.search.mtad import MtadDrafter
from outrider.sampling import Warp
from outrider.testing import check_drafter
from outrider.verifiers import Commit, Joint, Mtad, Rejection

γ = 4


def paths_of(draft: Draft, row: int) -> list[tuple[int, ...]]:
    """The tokens on the path to each drafted node that exists, in the order of the nodes."""
    paths: dict[int, tuple[int, ...]] = {0: ()}
    for node in range(1, draft.num_nodes):
        if bool(draft.mask_BN[row, node]):
            above = paths[int(draft.parents_BN[row, node])]
            paths[node] = (*above, int(draft.tokens_BN[row, node]))
    return list(paths.values())[1:]


def check_tree(setting: str, search: str) -> None:
    """The tree has all beams of all steps, dropped ones too, best first, within the budget."""
    model, prompts, sampling = tiny(dtype=torch.float64), ragged_prompts([6, 2]), SETTINGS[setting]
    drafter, context = MtadDrafter(model, VOCAB, 4, search), start(prompts, sampling)  # type: ignore[arg-type]
    budget = Budget(γ, torch.tensor([γ, γ - 2]))
    with torch.inference_mode():
        steps = list(drafter.steps(drafter.start(context), context, γ, context.rng))
        draft = drafter.propose(drafter.start(context), context, budget, context.rng)
    assert draft.probs_BNV is not None
    for row, prompt in enumerate(prompts):
        depth = γ - 2 * row
        expected = [path for step in steps[:depth] for path, _ in living_beams(step, row)]
        assert paths_of(draft, row) == expected
        for node in range(1, draft.num_nodes):
            if bool(draft.mask_BN[row, node]):
                above = int(draft.parents_BN[row, node])
                path = ((), *paths_of(draft, row))[: node + 1] if above else ((),)
                text = path[-1][:-1] if above else ()
                own_V = distribution_behind(model, prompt, text, sampling)
                assert torch.allclose(draft.probs_BNV[row, above], own_V, rtol=0, atol=1e-9)


@pytest.mark.parametrize("search", ["sample", "greedy"])
def test_the_tree_is_that_of_the_search(search: str) -> None:
    check_tree("warped", search)


def test_wrong_parents_would_show(monkeypatch: pytest.MonkeyPatch) -> None:
    """The mutant: parents as if beams were never reordered."""
    right = MtadDrafter._draft

    def wrong(self: MtadDrafter, *arguments: object) -> Draft:
        draft = right(self, *arguments)  # type: ignore[arg-type]
        above_N = (torch.arange(draft.num_nodes) - self.beams).clamp(min=0)
        return replace(
            draft, parents_BN=torch.where(draft.parents_BN > 0, above_N, draft.parents_BN)
        )

    monkeypatch.setattr(MtadDrafter, "_draft", wrong)
    with pytest.raises(AssertionError):
        check_tree("warped", "greedy")


@pytest.mark.parametrize("search", ["sample", "greedy"])
def test_contract(search: str) -> None:
    def distribution(num_rows: int) -> Distribution:
        sampling = Sampling(temperature=0.8, frequency_penalty=0.3, logit_bias={0: 0.5})
        return Warp([sampling] * num_rows, 6)

    with torch.inference_mode():
        check_drafter(MtadDrafter(toy(1, 6), 6, 3, search), 6, distribution=distribution)  # type: ignore[arg-type]


def test_one_beam_and_temperature_zero_are_chains() -> None:
    for beams, temperature in ((1, 1.0), (4, 0.0)):
        drafter = MtadDrafter(tiny(), VOCAB, beams)
        context = start(ragged_prompts([6, 2]), Sampling(temperature=temperature))
        with torch.inference_mode():
            draft = drafter.propose(drafter.start(context), context, Budget(γ), context.rng)
        assert draft.is_chain
        assert draft.num_nodes == γ + 1


def test_too_many_nodes_for_a_pass_are_an_error() -> None:
    MtadDrafter(tiny(), VOCAB, 51, depth=5)
    with pytest.raises(InvalidParameterError, match=r"beams=52: .* 260 nodes.* take 51 beams"):
        MtadDrafter(tiny(), VOCAB, 52, depth=5)
    with pytest.raises(InvalidParameterError, match="search='copies'"):
        MtadDrafter(tiny(), VOCAB, 4, "copies")  # type: ignore[arg-type]


def test_rules_for_one_path_or_for_draws_do_not_accept_it() -> None:
    drafter = MtadDrafter(tiny(), VOCAB, 2)
    with pytest.raises(IncompatibleError, match="cannot verify 'searched'"):
        check_compatible(drafter, Rejection())
    check_compatible(drafter, Mtad())
    context = start(ragged_prompts([6]), Sampling())
    with torch.inference_mode():
        draft = drafter.propose(drafter.start(context), context, Budget(γ), context.rng)
    for rule in (Joint(), Commit()):
        with pytest.raises(IncompatibleError, match="a single path"):
            rule(draft, torch.zeros(1, draft.num_nodes, VOCAB), context.rng)

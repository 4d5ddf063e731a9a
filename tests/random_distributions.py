"""Random pairs of distributions of all kinds that break rules, distances between distributions,
and toys with one position.

Legend: V vocabulary, S sequences (V^length, the first token the most significant digit).
"""

import itertools
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from outrider.core import ClosedFormRule, Drawn, Verifier, output_distribution
from outrider.testing import ToyDrafter, ToyModel, chi2_p_value, enumerate_round, sample_rounds

KINDS = ("apart", "near", "equal", "disjoint", "certain", "zeros", "sharp", "tied")


def random_pairs(num: int, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Pairs (p_V, q_V) in float64, V from 2 to 2,000, cycling through the kinds.

    The kinds: softmaxes of independent normal logits; distributions that differ by 1e-12 to 1e-1 of
    themselves; the same distribution twice; distributions without a common token; one of them or
    both a point mass; both restricted to random supports, as by top-k; logits so wide that most
    mass is on a few tokens, and others underflow; few distinct probabilities, so that there are
    ties.
    """
    generator = torch.Generator().manual_seed(seed)

    def uniform(low: float, high: float) -> float:
        return low + (high - low) * float(torch.rand((), generator=generator))

    def weights(V: int, scale: float = 1.5) -> Tensor:
        z_V = scale * torch.randn(V, generator=generator, dtype=torch.float64)
        return (z_V - z_V.max()).exp()

    def some(V: int) -> Tensor:
        """A random set of at least one token."""
        in_V = torch.rand(V, generator=generator) < uniform(0.05, 0.9)
        in_V[int(torch.randint(V, (), generator=generator))] = True
        return in_V

    def point(V: int) -> Tensor:
        at = torch.randint(V, (), generator=generator)
        return torch.zeros(V, dtype=torch.float64).index_fill(0, at, 1.0)

    for kind in itertools.islice(itertools.cycle(KINDS), num):
        V = int(2 * 1000 ** uniform(0, 1))
        p_V, q_V = weights(V), weights(V)
        match kind:
            case "near":
                noise_V = torch.rand(V, generator=generator, dtype=torch.float64)
                q_V = p_V * (1 + 10 ** uniform(-12, -1) * noise_V)
            case "equal":
                q_V = p_V
            case "disjoint":
                in_V = torch.arange(V) < 1 + int(uniform(0, V - 1))
                p_V, q_V = p_V * in_V, q_V * ~in_V
            case "certain":
                which = int(uniform(0, 3))
                p_V = p_V if which == 0 else point(V)
                q_V = q_V if which == 1 else point(V)
            case "zeros":
                p_V, q_V = p_V * some(V), q_V * some(V)
            case "sharp":
                p_V, q_V = weights(V, uniform(5, 300)), weights(V, uniform(5, 300))
            case "tied":
                p_V, q_V = ((3 * w_V).ceil() for w_V in (p_V, q_V))
        yield p_V / p_V.sum(), q_V / q_V.sum()


def kl(p_V: Tensor, q_V: Tensor) -> Tensor:
    """KL(p‖q); terms with p = 0 are 0, and q = 0 < p gives infinity."""
    return torch.where(p_V > 0, p_V * (p_V.log() - q_V.log()), 0.0).sum(-1)


def total_variation(p_V: Tensor, q_V: Tensor) -> Tensor:
    return 0.5 * (p_V - q_V).abs().sum(-1)


# --------------------------------------------------------------- output distributions of a rule


def toy_pairs() -> dict[str, tuple[Tensor, Tensor]]:
    """Pairs with three or four tokens: with common support, with zeros, with disjoint supports."""
    pairs = {
        "alike": ([0.5, 0.3, 0.2], [0.45, 0.25, 0.3]),
        "unlike": ([0.1, 0.2, 0.7], [0.6, 0.3, 0.1]),
        "zero in p": ([0.6, 0.4, 0.0], [0.3, 0.2, 0.5]),
        "zero in q": ([0.5, 0.3, 0.2], [0.0, 0.4, 0.6]),
        "zeros": ([0.7, 0.3, 0.0, 0.0], [0.0, 0.8, 0.2, 0.0]),
        "disjoint": ([0.6, 0.4, 0.0, 0.0], [0.0, 0.0, 0.3, 0.7]),
        "certain": ([0.0, 1.0, 0.0], [0.2, 0.5, 0.3]),
        "equal": ([0.2, 0.5, 0.3], [0.2, 0.5, 0.3]),
    }
    tensors = {name: torch.tensor(pair, dtype=torch.float64) for name, pair in pairs.items()}
    return {name: (p_V, q_V) for name, (p_V, q_V) in tensors.items()}


def drawn_from(q_V: Tensor, drawn: Drawn) -> Tensor:
    """The distribution of a toy drafter's candidate: q, or the point mass at its argmax if
    chosen."""
    if drawn == "iid":
        return q_V
    return torch.zeros_like(q_V).scatter(-1, q_V.argmax(-1, keepdim=True), 1.0)


def enumerated_distribution(
    rule: Verifier, p_V: Tensor, q_V: Tensor, drawn: Drawn = "iid"
) -> Tensor:
    """Output distribution at a position with one candidate, computed with the real code; see
    ``output_distribution``."""
    target, guess = (ToyModel(probs_V.log()[None], order=0) for probs_V in (p_V, q_V))
    drafter = ToyDrafter(guess, drawn=drawn)
    return enumerate_round(target, drafter, rule, 1, length=1).completed_S


def sampled_against_closed_form(
    rule: ClosedFormRule,
    *,
    drawn: Drawn = "iid",
    seeds: Sequence[int] = (1, 2),
    num_impossible: int = 0,
    num_tokens: int = 3,
    num_rows: int = 200_000,
) -> float:
    """CHI2 for a lossy rule: the p-value of the first tokens of many requests.

    Within a draft, the token after a prefix has the distribution π that the rule's closed form
    gives for p and q after that prefix, however many rounds the prefix took; only the token after a
    fully accepted draft is drawn from p. The distribution of the first ``num_tokens`` tokens is
    therefore the product of the π. The distributions of the toys depend on one preceding token.
    """
    target, guess = (
        ToyModel.random(3, order=1, seed=seed, num_impossible=num_impossible) for seed in seeds
    )
    p_VV, q_VV = target.table_EV.softmax(-1), guess.table_EV.softmax(-1)
    pi_VV = output_distribution(rule, p_VV, drawn_from(q_VV, drawn))
    prompt = (0, 1)
    probs_S = pi_VV[prompt[-1]]
    for _ in range(num_tokens - 1):
        probs_S = (probs_S.reshape(-1, 3, 1) * pi_VV).flatten()
    tokens_BK = sample_rounds(
        target,
        ToyDrafter(guess, drawn=drawn),
        rule,
        num_tokens,
        length=num_tokens,
        num_rows=num_rows,
        prompt=prompt,
    )
    index_B = torch.zeros(num_rows, dtype=torch.int64)
    for token_B in tokens_BK.unbind(1):
        index_B = index_B * 3 + token_B
    return chi2_p_value(torch.bincount(index_B, minlength=len(probs_S)), probs_S)

"""Methods that draft without a model: what the text or earlier texts said, or nothing in earnest.

A copied token has no distribution to be verified by but the point mass at itself. Rejection
sampling then accepts it with probability p(x), and so does the shared noise of ``Coupled``, whose
text is that of plain decoding whatever is drafted: the rule for drafts that depend on more than the
row itself.
"""

from outrider.drafters.chain.random import RandomDrafter
from outrider.drafters.chain.synthetic import Synthetic
from outrider.drafters.lookup.prompt_lookup import Match, PromptLookup
from outrider.drafters.lookup.suffix import Shape, SuffixDecoding
from outrider.methods.method import Method, Parts
from outrider.verifiers import Coupled, Rejection


def _lookup(
    parts: Parts,
    *,
    prompt_lookup_max: int = 3,
    prompt_lookup_min: int = 1,
    match: Match = "latest",
    tail: int = 1,
) -> PromptLookup:
    return PromptLookup(prompt_lookup_max, prompt_lookup_min, match, tail)


def _suffix(
    parts: Parts,
    *,
    shape: Shape = "chain",
    factor: float = 2.0,
    min_prob: float = 0.1,
    corpus_tokens: int = 100_000,
) -> SuffixDecoding:
    return SuffixDecoding(shape, factor, min_prob, corpus_tokens)


def _random(parts: Parts, *, spread: float = 2.0) -> RandomDrafter:
    return RandomDrafter(parts.target.num_tokens, spread)


def _uniform(parts: Parts) -> RandomDrafter:
    return RandomDrafter(parts.target.num_tokens, 0.0)


def _synthetic(parts: Parts, *, acceptance: float = 0.8) -> Synthetic:
    return Synthetic(parts.target.num_tokens, acceptance)


COPYING = (
    Method(
        "prompt-lookup",
        "Copies what followed the last tokens when the text had them before.",
        "Saxena, 2023; Yang et al. (LLMA), 2023",
        "nothing",
        Rejection,
        _lookup,
        stops_when_unsure=False,
    ),
    Method(
        "suffix",
        "The likeliest continuation of the longest match, in this text or in earlier outputs.",
        "Oliaro et al. (SuffixDecoding), NeurIPS 2025; Hu et al. (SAM Decoding), ACL 2025",
        "nothing",
        Coupled,
        _suffix,
        stops_when_unsure=False,
    ),
    Method(
        "random",
        "Tokens from random distributions, for tests and for the cost of refusals.",
        "an instrument",
        "nothing",
        Rejection,
        _random,
        stops_when_unsure=False,
    ),
    Method(
        "uniform",
        "The same from the uniform distribution.",
        "an instrument",
        "nothing",
        Rejection,
        _uniform,
        stops_when_unsure=False,
    ),
    Method(
        "synthetic",
        "The text of an earlier run with the same seed, right with a chosen probability.",
        "an instrument",
        "nothing",
        Coupled,
        _synthetic,
        stops_when_unsure=False,
    ),
)

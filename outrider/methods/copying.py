"""Methods that draft without a model: copies from the prompt or earlier outputs, and instruments.

The draft distribution of a copied token is the point mass at that token, so rejection sampling
accepts it with probability p(x). ``Coupled`` accepts it equally often, and its output is that of
plain decoding whatever is drafted: it is the rule for drafts that depend on other requests.
"""

from outrider.drafters.chain.random import RandomDrafter
from outrider.drafters.chain.synthetic import Synthetic
from outrider.drafters.lookup.predicted import PredictedOutput
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
        "Copies what followed an earlier occurrence of the last tokens.",
        "Saxena, 2023; Yang et al. (LLMA), 2023",
        "nothing",
        Rejection,
        _lookup,
        stops_when_unsure=False,
    ),
    Method(
        "suffix",
        "Copies the most frequent continuation of the longest match, here or in earlier outputs.",
        "Oliaro et al. (SuffixDecoding), NeurIPS 2025; Hu et al. (SAM Decoding), ACL 2025",
        "nothing",
        Coupled,
        _suffix,
        stops_when_unsure=False,
    ),
    Method(
        "random",
        "Tokens from random distributions, to test and to measure the cost of rejections.",
        "an instrument",
        "nothing",
        Rejection,
        _random,
        stops_when_unsure=False,
    ),
    Method(
        "uniform",
        "Tokens from the uniform distribution, for the same purpose.",
        "an instrument",
        "nothing",
        Rejection,
        _uniform,
        stops_when_unsure=False,
    ),
    Method(
        "synthetic",
        "The output of an earlier run with the same seed, each token right with a set probability.",
        "an instrument",
        "nothing",
        Coupled,
        _synthetic,
        stops_when_unsure=False,
    ),
)

PREDICTED = Method(
    "predicted-output",
    "Copies the output that the user expects.",
    "OpenAI (Predicted Outputs), 2024; Yang et al. (LLMA), 2023",
    "nothing",
    Coupled,
    lambda parts: PredictedOutput(),
    stops_when_unsure=False,
)
"""For requests with a ``prediction``, without which it drafts nothing; so it is no row of
``METHODS``. An output is that of plain decoding, whatever was expected."""

"""Plain decoding, and the methods that draft a chain with a draft model."""

from outrider.drafters import COUPLED, BildDrafter, ModelDrafter, NoDraft
from outrider.drafters.chain.fused_model import FusedModelDrafter
from outrider.drafters.chain.pick import INDEPENDENT, Picker
from outrider.methods.method import Method, Parts
from outrider.verifiers import (
    Bild,
    Block,
    Cascade,
    CascadeGreedy,
    Coupled,
    Ensemble,
    EnsembleGreedy,
    Greedy,
    Lenience,
    Mentored,
    Rejection,
    Relaxed,
    RelaxedGreedy,
    SampleMatch,
    Typical,
)

LONGER = 2, 3, 5
"""Lengths of governed drafts that have programs of their own, besides 1: those up to 8 that have
none take two."""


def _no_draft(parts: Parts) -> NoDraft:
    return NoDraft()


def _chain(parts: Parts, *, keep_logits: bool = False) -> ModelDrafter:
    return chain_drafter(parts, INDEPENDENT, keep_logits)


def chain_drafter(
    parts: Parts, picker: Picker, keep_logits: bool = False, most: int | None = None
) -> FusedModelDrafter:
    """A chain whose tokens this picker takes; of at most so many, if that is given."""
    longest = parts.fixed_length if most is None else min(most, parts.fixed_length)
    num_fused = 1 if parts.stop is not None or parts.lengths_vary else longest
    longer = LONGER if parts.governed and parts.stop is None else ()
    return FusedModelDrafter(
        parts.draft_model,
        parts.target.num_tokens,
        parts.stop,
        num_fused=num_fused,
        longer=[length for length in longer if most is None or length <= most],
        picker=picker,
        keep_logits=keep_logits,
    )


def _chain_with_logits(parts: Parts) -> ModelDrafter:
    return _chain(parts, keep_logits=True)


def _coupled_chain(parts: Parts) -> ModelDrafter:
    return chain_drafter(parts, COUPLED)


def _bild(parts: Parts, *, fallback: float = 0.6, mode: str = "original") -> ModelDrafter:
    """The MJSD variant keeps the unsure token and verifies it, as the confidence stop does."""
    if mode == "original":
        return BildDrafter(parts.draft_model, parts.target.num_tokens, fallback)
    num_tokens = parts.target.num_tokens
    return FusedModelDrafter(parts.draft_model, num_tokens, fallback, num_fused=1)


_LEVIATHAN = "Leviathan et al., ICML 2023; Chen et al., 2023"
_DRAFT = "draft model"

CHAINS = (
    Method(
        "plain",
        "The target alone, one token per pass.",
        "autoregressive sampling",
        "nothing",
        Coupled,
        _no_draft,
    ),
    Method(
        "speculative",
        "A draft model's chain, verified by rejection sampling.",
        _LEVIATHAN,
        _DRAFT,
        Rejection,
        _chain,
    ),
    Method(
        "block",
        "A draft model's chain, verified as a whole; no lossless rule accepts more on average.",
        "Sun et al., ICLR 2025",
        _DRAFT,
        Block,
        _chain,
    ),
    Method(
        "greedy",
        "A draft model's chain, kept while it is the target's argmax; temperature 0 only.",
        _LEVIATHAN,
        _DRAFT,
        Greedy,
        _chain,
    ),
    Method(
        "sample-match",
        "The target draws its own tokens; the draft's are kept while they are equal.",
        "Miao et al., ASPLOS 2024; assisted generation in transformers",
        _DRAFT,
        SampleMatch,
        _chain,
    ),
    Method(
        "coupled",
        "Draft and target share their noise: the output of plain with the same seed, faster.",
        "Daliri et al., 2024",
        _DRAFT,
        Coupled,
        _coupled_chain,
    ),
    Method(
        "mentored",
        "Accepts as much as a bound on the divergence per token allows.",
        "Tran-Thien, 2023",
        _DRAFT,
        Mentored,
        _chain,
    ),
    Method(
        "lenience",
        "Rejection sampling with the target's distribution divided by the lenience.",
        "Leviathan et al., ICML 2023, appendix A.5",
        _DRAFT,
        Lenience,
        _chain,
    ),
    Method(
        "ensemble",
        "Samples from a fixed mixture of the target's and the draft's distribution.",
        "DIVERSE, arXiv 2604.07622; transformers' assistant_ensemble_weight",
        _DRAFT,
        Ensemble,
        _chain_with_logits,
        lambda rule: EnsembleGreedy(rule.weight),
    ),
    Method(
        "cascade",
        "Samples from the draft's distribution where a deferral rule trusts it, else the target's.",
        "Narasimhan et al., ICLR 2025",
        _DRAFT,
        Cascade,
        _chain_with_logits,
        lambda rule: CascadeGreedy(rule.deferral, rule.alpha),
    ),
    Method(
        "relaxed",
        "Accepts tokens among the target's top k whose probability is close to the best one's.",
        "relaxed acceptance of TensorRT-LLM, 2025",
        _DRAFT,
        Relaxed,
        _chain,
        lambda rule: RelaxedGreedy(rule.top_k, rule.delta),
    ),
    Method(
        "typical",
        "Accepts tokens that are probable enough, given the entropy of the target's distribution.",
        "Cai et al. (Medusa), ICML 2024",
        _DRAFT,
        Typical,
        _chain,
    ),
    Method(
        "bild",
        "The draft decodes while it is sure; tokens that the target finds improbable are rolled "
        "back; temperature 0 only, unless mode=mjsd.",
        "Kim et al., NeurIPS 2023",
        _DRAFT,
        Bild,
        _bild,
        lambda rule: rule if rule.mode == "original" else Greedy(),
    ),
)

"""Methods that draft from several sources: copies where something matches, else a draft model or a
head."""

from dataclasses import dataclass
from itertools import chain
from typing import Any, Literal

from outrider.core import Drafter
from outrider.core.errors import InvalidParameterError
from outrider.drafters.chain.pick import INDEPENDENT
from outrider.drafters.heads.eagle3 import (
    Eagle3Drafter,
    Eagle3Head,
    Eagle3Model,
    Eagle3TreeDrafter,
)
from outrider.drafters.lookup import prompt_lookup, suffix
from outrider.drafters.lookup.prompt_lookup import PromptLookup
from outrider.drafters.lookup.suffix import SuffixDecoding
from outrider.drafters.sources.bandit import Bandit
from outrider.drafters.sources.hybrid import Hybrid, Order
from outrider.drafters.sources.merge import BEST, Merged
from outrider.drafters.sources.sources import Source
from outrider.drafters.tree.topology import Topology
from outrider.drafters.within_context import within_context
from outrider.methods.chains import chain_drafter
from outrider.methods.heads import TREE, head_of
from outrider.methods.method import Method, Parts
from outrider.runtime import HFModel
from outrider.verifiers import Distinct, Rejection

Mode = Literal["order", "bandit", "tree"]
ChainMode = Literal["order", "bandit"]
Learn = Literal["request", "all"]
_NAMES = ("lookup", "suffix", "model")


@dataclass(frozen=True)
class SourceNames:
    """The names of the sources, in order."""

    names: tuple[str, ...] = ("suffix", "model")

    def __str__(self) -> str:
        return ",".join(self.names)

    @classmethod
    def parse(cls, text: str) -> "SourceNames":
        """Reads some of ``lookup``, ``suffix`` and ``model``, separated by commas.

        Raises:
            InvalidParameterError: another name, or a name twice.
        """
        names = tuple(text.split(",")) if isinstance(text, str) else ()
        if not names or not set(names) <= set(_NAMES) or len(set(names)) < len(names):
            raise InvalidParameterError(
                f"must be some of {', '.join(_NAMES)}, each at most once, separated by commas"
            )
        return cls(names)


_SOURCES = SourceNames()


def _hybrid(
    parts: Parts,
    *,
    mode: Mode = "order",
    sources: SourceNames = _SOURCES,
    prompt_lookup_max: int = 3,
    prompt_lookup_min: int = 1,
    min_prob: float = 0.1,
    suffix_least: int = 3,
    model_tokens: int = 5,
    cost_ratio: float = 0.0,
    verify_cost: float = 0.03,
    discount: float = 0.9,
    learn: Learn = "request",
) -> Drafter[Any]:
    """By default suffix, then model: the automaton finds every match that a lookup finds, and knows
    how often it was right. A cost ratio of 0 stands for the ratio of the models' parameter counts;
    the cost of verifying is the time that one more token adds to a target pass. There is no corpus
    of earlier outputs, which would make an output depend on earlier requests."""
    for name, value in (("cost_ratio", cost_ratio), ("verify_cost", verify_cost)):
        if not 0 <= value < float("inf"):
            raise InvalidParameterError(f"{name}={value!r}: must be a finite number from 0 up")
    draft, num_tokens = parts.draft_model, parts.target.num_tokens
    cost = cost_ratio or num_parameters(draft) / num_parameters(parts.target)
    picker = BEST if mode == "tree" else INDEPENDENT
    model = within_context(chain_drafter(parts, picker, most=model_tokens), parts.target)
    lookup = PromptLookup(prompt_lookup_max, prompt_lookup_min)
    known = {
        "lookup": Source(lookup, prompt_lookup.DEPTH),
        "suffix": Source(SuffixDecoding(min_prob=min_prob, corpus_tokens=0), suffix.DEPTH),
        "model": Source(model, model_tokens, cost),
    }
    chosen = [known[name] for name in sources.names]
    if mode == "tree":
        return Merged(chosen)
    if mode == "order":
        least = [suffix_least if name == "suffix" else 1 for name in sources.names]
        return Hybrid(chosen, Order(least), num_tokens)
    classify = None if learn == "request" else lambda context, row: context.distribution.greedy
    costs = [each.cost + verify_cost for each in chosen]
    return Hybrid(chosen, Bandit(costs, discount, classify), num_tokens)


def _with_head(
    parts: Parts,
    *,
    mode: ChainMode = "order",
    min_prob: float = 0.1,
    suffix_least: int = 3,
    head_tokens: int = 5,
    verify_cost: float = 0.03,
    discount: float = 0.9,
) -> Hybrid:
    """Suffix decoding, then the head; options as of ``hybrid``."""
    if not 0 <= verify_cost < float("inf"):
        raise InvalidParameterError(
            f"verify_cost={verify_cost!r}: must be a finite number from 0 up"
        )
    model = Eagle3Model(head_of(parts, Eagle3Head), parts.target)
    head = Eagle3Drafter(
        model,
        parts.target.num_tokens,
        parts.stop,
        num_fused=head_tokens,
        has_short_program=parts.governed,
    )
    cost = num_parameters(model) / num_parameters(parts.target)
    copies = SuffixDecoding(min_prob=min_prob, corpus_tokens=0)
    chosen = [Source(copies, suffix.DEPTH), Source(head, head_tokens, cost)]
    if mode == "order":
        return Hybrid(chosen, Order([suffix_least, 1]), parts.target.num_tokens)
    costs = [each.cost + verify_cost for each in chosen]
    return Hybrid(chosen, Bandit(costs, discount), parts.target.num_tokens)


def _with_head_tree(
    parts: Parts,
    *,
    topology: Topology = TREE,
    min_prob: float = 0.1,
    suffix_least: int = 3,
) -> Hybrid:
    """Suffix decoding, then the head's tree; options as of ``hybrid`` and ``eagle3-tree``."""
    num_tokens = parts.target.num_tokens
    model = Eagle3Model(head_of(parts, Eagle3Head), parts.target)
    tree = Eagle3TreeDrafter(model, num_tokens, topology, "distinct")
    copies = Source(SuffixDecoding(min_prob=min_prob, corpus_tokens=0), suffix.DEPTH)
    cost = num_parameters(model) / num_parameters(parts.target)
    sources = [copies, Source(tree, topology.depth, cost)]
    return Hybrid(sources, Order([suffix_least, 1]), num_tokens)


def num_parameters(model: HFModel) -> int:
    """Number of a model's parameters; tied ones count once. Quantised weights may be buffers."""
    module = model.module
    return sum(each.numel() for each in chain(module.parameters(), module.buffers()))


HYBRIDS = (
    Method(
        "hybrid",
        "Copies where the output repeats itself, else a draft model: by order, bandit or tree.",
        "after Saxena, 2023, and Oliaro et al. (SuffixDecoding), NeurIPS 2025",
        "draft model",
        Rejection,
        _hybrid,
    ),
)

HEAD_HYBRIDS = (
    Method(
        "eagle3-hybrid",
        "Copies where the output repeats itself, else an EAGLE-3 head's chain: by order or bandit.",
        "after Li et al. (EAGLE-3) and Oliaro et al. (SuffixDecoding), NeurIPS 2025",
        "head: eagle3",
        Rejection,
        _with_head,
    ),
    Method(
        "eagle3-tree-hybrid",
        "Copies where the output repeats itself, else an EAGLE-3 head's tree of fixed shape.",
        "after Li et al. (EAGLE-3) and Oliaro et al. (SuffixDecoding), NeurIPS 2025",
        "head: eagle3",
        Distinct,
        _with_head_tree,
        stops_when_unsure=False,
    ),
)

"""Joint decoding: methods that search for probable sequences. They do not preserve the target's
distribution."""

from enum import StrEnum

from outrider.core.errors import InvalidParameterError
from outrider.drafters.search.beam import BeamDrafter, MjgdDrafter, Search
from outrider.drafters.search.beam_search import EarlyStopping
from outrider.drafters.search.full_search import FullSearchDrafter
from outrider.drafters.search.mtad import MtadDrafter
from outrider.drafters.search.mtad import Search as TreeSearch
from outrider.methods.method import Method, Parts
from outrider.runtime import HFModel
from outrider.runtime.hf.eos import eos_ids
from outrider.verifiers import Commit, Greedy, Joint, Mtad
from outrider.verifiers.joint import Distributions


class Early(StrEnum):
    """The ``early_stopping`` parameter of transformers, by name."""

    FALSE = "false"
    TRUE = "true"
    NEVER = "never"

    @classmethod
    def parse(cls, value: object) -> "Early":
        """Reads a text, or the values of transformers: True, False or "never"."""
        try:
            return cls(str(value).lower())
        except ValueError:
            raise InvalidParameterError("must be true, false or never") from None

    @property
    def value_there(self) -> EarlyStopping:
        """The value in transformers."""
        return "never" if self is Early.NEVER else self is Early.TRUE


def _best_beam(
    parts: Parts,
    *,
    beams: int = 8,
    search: Search = "sample",
    distributions: Distributions = "warped",
) -> BeamDrafter:
    keep_logits = distributions == "raw"
    draft = parts.draft_model
    return BeamDrafter(
        draft,
        parts.target.num_tokens,
        beams,
        search,
        keep_logits=keep_logits,
        num_fused=parts.fixed_length,
    )


def _all_beams(parts: Parts, *, beams: int = 4, search: TreeSearch = "sample") -> MtadDrafter:
    depth = parts.num_speculative_tokens or MtadDrafter.DEPTH
    fused = parts.fixed_length > 0
    return MtadDrafter(
        parts.draft_model, parts.target.num_tokens, beams, search, depth, fused=fused
    )


def _blocks(parts: Parts, *, beams: int = 8) -> MjgdDrafter:
    γ = parts.num_speculative_tokens or MjgdDrafter.DEPTH
    K = γ + 1 if parts.fixed_length else 0
    return MjgdDrafter(_second(parts.target), parts.target.num_tokens, beams, num_fused=K)


def _whole(
    parts: Parts,
    *,
    num_beams: int = 8,
    length_penalty: float = 1.0,
    early_stopping: Early = Early.FALSE,
) -> FullSearchDrafter:
    ends = eos_ids(parts.target)
    stop = early_stopping.value_there
    return FullSearchDrafter(_second(parts.target), num_beams, length_penalty, stop, ends)


def _second(target: HFModel) -> HFModel:
    """The target in a second role, with a timer and health check of its own."""
    return target.in_role(f"search by {target.name}")


_MJSD = "Qin et al. (MJSD), 2024"

JOINT = (
    Method(
        "mjsd",
        "The best path of the draft's beam search, kept as long as it is jointly probable.",
        _MJSD,
        "draft model",
        Joint,
        _best_beam,
        lambda rule: Greedy() if rule.distributions == "warped" else rule,
        stops_when_unsure=False,
    ),
    Method(
        "mtad",
        "All beams of the draft's search; the target keeps the longest that is jointly probable.",
        "Qin et al. (MTAD), ICLR 2025",
        "draft model",
        Mtad,
        _all_beams,
        stops_when_unsure=False,
    ),
    Method(
        "mjgd",
        "The target's own beam search, a few tokens at a time; temperature 0 only.",
        _MJSD,
        "nothing",
        Commit,
        _blocks,
        lambda rule: rule,
        stops_when_unsure=False,
    ),
    Method(
        "beam-search",
        "The target's own beam search over the whole output; temperature 0 only.",
        "beam search, with the conventions of transformers",
        "nothing",
        Commit,
        _whole,
        lambda rule: rule,
        stops_when_unsure=False,
    ),
)

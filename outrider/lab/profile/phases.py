"""Where the time of a round goes: every span's own time, by what it was spent on.

    draft    its passes; masks and places of tokens around them; drawing, and what drawing needs
    target   its pass; masks and places around it
    verify   the target's distributions; the rule
    cache    keeping the accepted path, in the caches and in the text
    Python   the divergence of lossy rules, log-probabilities, the one look at the device, the
             text and its end, and the rest of the loop

What lies inside a drafter's ``propose`` is the draft's, whatever it is: a drafter may run rounds of
its own. So the phases of a round add up to the round.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from outrider.lab.profile.instrument import TARGET
from outrider.lab.profile.spans import Span

DRAFT_PASS, TARGET_PASS = ("draft", "passes"), ("target", "pass")
PHASES: tuple[tuple[str, str], ...] = (
    DRAFT_PASS,
    ("draft", "around the passes"),
    ("draft", "drawing"),
    TARGET_PASS,
    ("target", "around the pass"),
    ("verify", "distributions"),
    ("verify", "rule"),
    ("cache", "commit"),
    ("Python", "divergence"),
    ("Python", "log-probabilities"),
    ("Python", "reading"),
    ("Python", "text"),
    ("Python", "rest"),
)
_PHASE_OF = {
    "score": ("target", "around the pass"),
    "extend": ("target", "around the pass"),
    "distribution": ("verify", "distributions"),
    "rule": ("verify", "rule"),
    "commit": ("cache", "commit"),
    "draft commit": ("cache", "commit"),
    "append": ("cache", "commit"),
    "divergence": ("Python", "divergence"),
    "logprobs": ("Python", "log-probabilities"),
    "read": ("Python", "reading"),
    "text": ("Python", "text"),
    "round": ("Python", "rest"),
}


@dataclass(frozen=True)
class Passes:
    """A model's passes in a round, on average.

    Attributes:
        count: how many.
        tokens: per pass.
        context: tokens that were cached before.
        seconds: per pass, the forward pass alone.
    """

    count: float
    tokens: float
    context: float
    seconds: float


@dataclass(frozen=True)
class Phases:
    """Rounds by phase.

    Attributes:
        num_rounds: how many.
        seconds: of a round on average, from its first line to its last.
        parts: seconds per round by phase; they add up to ``seconds``.
        passes: of each track that has any.
        chain: whether every draft was a chain.
        num_spans: per round.
    """

    num_rounds: int
    seconds: float
    parts: dict[tuple[str, str], float]
    passes: dict[str, Passes]
    chain: bool
    num_spans: float

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "Phases":
        """Sorts the spans of rounds; of other work, such as prefill, nothing is counted."""
        inside = [span for span in spans if span.inside("round") is not None]
        rounds = [span for span in inside if span.name == "round"]
        num = len(rounds)
        assert num, "no round was recorded"
        parts = dict.fromkeys(PHASES, 0.0)
        for span in inside:
            parts[phase_of(span)] += span.own / num
        return cls(
            num,
            sum(span.seconds for span in rounds) / num,
            parts,
            {track: _passes(inside, track, num) for track in _tracks_with_passes(inside)},
            all(span.detail.get("chain", True) for span in inside if span.track == TARGET),
            len(inside) / num,
        )

    @property
    def outside(self) -> float:
        """Seconds per round outside both models' forward passes."""
        return self.seconds - self.parts[DRAFT_PASS] - self.parts[TARGET_PASS]

    def group(self, name: str) -> float:
        """Seconds per round of a group of phases, such as ``cache``."""
        return sum(seconds for (group, _), seconds in self.parts.items() if group == name)

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rounds": self.num_rounds,
            "seconds": self.seconds,
            "outside_passes": self.outside / self.seconds,
            "groups": {name: self.group(name) for name in dict.fromkeys(g for g, _ in PHASES)},
            "phases": [
                {"group": group, "phase": phase, "seconds": seconds}
                for (group, phase), seconds in self.parts.items()
            ],
            "passes": {track: vars(passes) for track, passes in self.passes.items()},
            "spans": self.num_spans,
        }


def phase_of(span: Span) -> tuple[str, str]:
    """What a span's own time was spent on."""
    drafting = span.inside("propose") is not None
    if span.name == "pass":
        return TARGET_PASS if span.track == TARGET else DRAFT_PASS
    if drafting or (span.track.startswith("draft") and span.name != "commit"):
        around = span.name in ("score", "extend")
        return ("draft", "around the passes" if around else "drawing")
    return _PHASE_OF[span.name]


def _tracks_with_passes(spans: Sequence[Span]) -> list[str]:
    return sorted({span.track for span in spans if span.name == "pass"}, reverse=True)


def _passes(spans: Sequence[Span], track: str, num_rounds: int) -> Passes:
    seconds = sum(span.seconds for span in spans if span.track == track and span.name == "pass")
    asked = [span for span in spans if span.track == track and span.name == "extend"]
    weights = [span.detail.get("passes", 1) for span in asked]
    count = max(sum(weights), 1)

    def mean(what: str) -> float:
        return sum(w * span.detail[what] for w, span in zip(weights, asked, strict=True)) / count

    return Passes(count / num_rounds, mean("tokens"), mean("context"), seconds / count)

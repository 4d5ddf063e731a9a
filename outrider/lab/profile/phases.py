"""Where the time of a round goes: every span's own time, sorted by what it was spent on.

    draft    forward passes; positions and masks around them; drawing, and its distributions
    target   the forward pass; positions and masks around it
    verify   the target's distributions; the verification rule
    cache    committing the accepted path to the KV caches and the context
    Python   the divergence of lossy rules, log-probabilities, the device-to-host synchronisation,
             detokenisation and stop conditions, and the rest of the loop

Everything inside a drafter's ``propose`` counts as draft, since a drafter may run rounds of its
own. The phases of a round add up to the round.
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
    ("Python", "device-to-host sync"),
    ("Python", "text and stops"),
    ("Python", "other"),
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
    "device-to-host sync": ("Python", "device-to-host sync"),
    "take tokens": ("Python", "text and stops"),
    "round": ("Python", "other"),
}


@dataclass(frozen=True)
class Passes:
    """A model's forward passes in a round, on average.

    Attributes:
        count: passes per round.
        tokens: query tokens per pass.
        context: cached tokens before the pass.
        seconds: per pass.
    """

    count: float
    tokens: float
    context: float
    seconds: float


@dataclass(frozen=True)
class Phases:
    """The time of recorded rounds by phase.

    Attributes:
        num_rounds: recorded rounds.
        seconds: mean time of a round, from beginning to end.
        parts: seconds per round by phase; they add up to ``seconds``.
        passes: the forward passes by track.
        chain: whether every draft was a chain.
        num_spans: spans per round.
    """

    num_rounds: int
    seconds: float
    parts: dict[tuple[str, str], float]
    passes: dict[str, Passes]
    chain: bool
    num_spans: float

    @classmethod
    def of(cls, spans: Iterable[Span]) -> "Phases":
        """Sorts the spans of rounds by phase, and ignores spans outside rounds, such as prefill."""
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
        """All numbers as a JSON document."""
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
    extensions = [span for span in spans if span.track == track and span.name == "extend"]
    weights = [span.detail.get("passes", 1) for span in extensions]
    count = max(sum(weights), 1)

    def mean(what: str) -> float:
        pairs = zip(weights, extensions, strict=True)
        return sum(weight * span.detail[what] for weight, span in pairs) / count

    return Passes(count / num_rounds, mean("tokens"), mean("context"), seconds / count)

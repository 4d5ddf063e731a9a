"""The vocabulary of the project: nouns, interfaces, the round, random numbers. Torch only."""

from outrider.core.bound import LOSSLESS, Bound, Divergence
from outrider.core.chain import counting, full_chains, straight
from outrider.core.context import Context, Prefix
from outrider.core.draft import Draft, Drawn, Verdict
from outrider.core.draw import best, draw
from outrider.core.ends import Ends
from outrider.core.errors import OutriderError
from outrider.core.health import Health
from outrider.core.match import candidates_equal, match
from outrider.core.protocols import (
    Budget,
    Drafter,
    Law,
    Model,
    Needs,
    ReadsLogits,
    Scores,
    State,
    Verifier,
)
from outrider.core.race import noise, race
from outrider.core.rng import AHEAD, Role, Stream, row_keys
from outrider.core.round import (
    Judge,
    Judgement,
    Overlap,
    Round,
    by_the_rule,
    check_compatible,
    run_round,
)
from outrider.core.transfer import moved
from outrider.core.walk import (
    ClosedForm,
    NodeRule,
    at_node,
    output_law,
    path_to,
    require_chain,
    walk,
    walk_chain,
    walk_tree,
)

__all__ = [
    "AHEAD",
    "LOSSLESS",
    "Bound",
    "Budget",
    "ClosedForm",
    "Context",
    "Divergence",
    "Draft",
    "Drafter",
    "Drawn",
    "Ends",
    "Health",
    "Judge",
    "Judgement",
    "Law",
    "Model",
    "Needs",
    "NodeRule",
    "OutriderError",
    "Overlap",
    "Prefix",
    "ReadsLogits",
    "Role",
    "Round",
    "Scores",
    "State",
    "Stream",
    "Verdict",
    "Verifier",
    "at_node",
    "best",
    "by_the_rule",
    "candidates_equal",
    "check_compatible",
    "counting",
    "draw",
    "full_chains",
    "match",
    "moved",
    "noise",
    "output_law",
    "path_to",
    "race",
    "require_chain",
    "row_keys",
    "run_round",
    "straight",
    "walk",
    "walk_chain",
    "walk_tree",
]

"""The vocabulary of the project: nouns, interfaces, the round, random numbers. Torch only."""

from outrider.core.bound import LOSSLESS, Bound, Divergence
from outrider.core.capabilities import Capabilities
from outrider.core.chain import chain_tensors, counting, full_chains
from outrider.core.context import Context, Prefix
from outrider.core.draft import Draft, Drawn, Verdict
from outrider.core.draw import best, draw
from outrider.core.ends import Ends
from outrider.core.errors import OutriderError
from outrider.core.health import Health
from outrider.core.match import candidates_equal, match
from outrider.core.protocols import (
    Budget,
    Distribution,
    Drafter,
    Model,
    Needs,
    ReadsLogits,
    Scores,
    State,
    Verifier,
)
from outrider.core.race import race
from outrider.core.rng import AHEAD, Role, Stream, row_keys
from outrider.core.round import (
    Overlap,
    Round,
    Verification,
    VerificationExecutor,
    check_compatible,
    run_round,
    verify_eagerly,
)
from outrider.core.transfer import moved
from outrider.core.walk import (
    ClosedForm,
    NodeRule,
    at_node,
    output_distribution,
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
    "Capabilities",
    "ClosedForm",
    "Context",
    "Distribution",
    "Divergence",
    "Draft",
    "Drafter",
    "Drawn",
    "Ends",
    "Health",
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
    "Verification",
    "VerificationExecutor",
    "Verifier",
    "at_node",
    "best",
    "candidates_equal",
    "chain_tensors",
    "check_compatible",
    "counting",
    "draw",
    "full_chains",
    "match",
    "moved",
    "output_distribution",
    "path_to",
    "race",
    "require_chain",
    "row_keys",
    "run_round",
    "verify_eagerly",
    "walk",
    "walk_chain",
    "walk_tree",
]

"""The core of the project: its data structures and interfaces, the round, and random numbers.

Depends on torch only.
"""

from outrider.core.bound import LOSSLESS, Bound, Divergence
from outrider.core.capabilities import Capabilities
from outrider.core.chain import cached_arange, chain_tensors, chain_tensors_like
from outrider.core.context import Context, Distribution, Prefix
from outrider.core.draft import Acceptance, Draft, Drawn, Scores, Verdict
from outrider.core.draw import draw, draw_distinct
from outrider.core.ends import Ends
from outrider.core.errors import OutriderError
from outrider.core.health import Health
from outrider.core.lengths import Lengths, Sequences, to_device
from outrider.core.match import candidates_equal, match, match_picks
from outrider.core.protocols import (
    REVIEW_WIDTH,
    Budget,
    CanRollBack,
    ChecksDrafts,
    Drafter,
    Model,
    Needs,
    NodeDistributions,
    ReadHidden,
    ReadsHiddenStates,
    ReadsNodes,
    RemembersOutputs,
    ReviewsTokens,
    SequenceState,
    SharesHiddenStates,
    StartsLate,
    State,
    UsesRawLogits,
    Verifier,
)
from outrider.core.race import race
from outrider.core.reductions import any_of, argmax
from outrider.core.repeat import repeat_while, rows_of
from outrider.core.rng import NUM_PER_ROLE, Role, Stream, row_keys
from outrider.core.round import (
    Deferred,
    Overlap,
    Round,
    Verification,
    VerificationExecutor,
    check_compatible,
    commit_round,
    keep_accepted,
    prompt_reader,
    run_round,
    start_batch,
    verify_eagerly,
)
from outrider.core.walk import (
    ClosedFormRule,
    NodeRule,
    at_node,
    output_distribution,
    path_to,
    require_chain,
    walk,
    walk_chain,
    walk_down,
    walk_tree,
)

__all__ = [
    "LOSSLESS",
    "NUM_PER_ROLE",
    "REVIEW_WIDTH",
    "Acceptance",
    "Bound",
    "Budget",
    "CanRollBack",
    "Capabilities",
    "ChecksDrafts",
    "ClosedFormRule",
    "Context",
    "Deferred",
    "Distribution",
    "Divergence",
    "Draft",
    "Drafter",
    "Drawn",
    "Ends",
    "Health",
    "Lengths",
    "Model",
    "Needs",
    "NodeDistributions",
    "NodeRule",
    "OutriderError",
    "Overlap",
    "Prefix",
    "ReadHidden",
    "ReadsHiddenStates",
    "ReadsNodes",
    "RemembersOutputs",
    "ReviewsTokens",
    "Role",
    "Round",
    "Scores",
    "SequenceState",
    "Sequences",
    "SharesHiddenStates",
    "StartsLate",
    "State",
    "Stream",
    "UsesRawLogits",
    "Verdict",
    "Verification",
    "VerificationExecutor",
    "Verifier",
    "any_of",
    "argmax",
    "at_node",
    "cached_arange",
    "candidates_equal",
    "chain_tensors",
    "chain_tensors_like",
    "check_compatible",
    "commit_round",
    "draw",
    "draw_distinct",
    "keep_accepted",
    "match",
    "match_picks",
    "output_distribution",
    "path_to",
    "prompt_reader",
    "race",
    "repeat_while",
    "require_chain",
    "row_keys",
    "rows_of",
    "run_round",
    "start_batch",
    "to_device",
    "verify_eagerly",
    "walk",
    "walk_chain",
    "walk_down",
    "walk_tree",
]

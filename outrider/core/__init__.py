"""The vocabulary of the project: nouns, interfaces, the round, random numbers. Torch only."""

from outrider.core.context import Context, Prefix
from outrider.core.draft import Draft, Drawn, Verdict
from outrider.core.draw import draw
from outrider.core.errors import OutriderError
from outrider.core.protocols import Budget, Drafter, Law, Model, Scores, State, Verifier
from outrider.core.rng import Role, Stream, row_keys
from outrider.core.round import Round, check_compatible, run_round
from outrider.core.walk import NodeRule, path_to, walk, walk_chain, walk_tree

__all__ = [
    "Budget",
    "Context",
    "Draft",
    "Drafter",
    "Drawn",
    "Law",
    "Model",
    "NodeRule",
    "OutriderError",
    "Prefix",
    "Role",
    "Round",
    "Scores",
    "State",
    "Stream",
    "Verdict",
    "Verifier",
    "check_compatible",
    "draw",
    "path_to",
    "row_keys",
    "run_round",
    "walk",
    "walk_chain",
    "walk_tree",
]

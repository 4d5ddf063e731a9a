"""The proof kit: toy models with known distributions, exact enumeration, statistical tests, mutants
and contract checks.

It serves the project's own methods and those of third parties. It depends on torch and
``outrider.core`` only, not on any method that it verifies.

    ENUM      enumerate_round(target, drafter, verifier).total_variation < 1e-12
    CHI2      chi2(target, drafter, verifier) > 1e-4
    Contract  check_model, check_drafter, check_verifier
    MUT       outrider.testing.mutants: wrong implementations that the checks above must reject
"""

from outrider.testing.checks import check_draft, check_drafter, check_model, check_verifier
from outrider.testing.chi2 import chi2, chi2_p_value, sample_rounds
from outrider.testing.enumerate import (
    DistributionFactory,
    RoundDistribution,
    ScriptedContext,
    complete,
    enumerate_round,
    greedy_distribution,
    softmax_distribution,
    target_distribution,
)
from outrider.testing.partition import Boxes, partition
from outrider.testing.recurrent import RecurrentSnapshot, RecurrentState, RecurrentToy
from outrider.testing.script import ScriptedStream
from outrider.testing.toy import SoftmaxDistribution, ToyCache, ToyDrafter, ToyModel, last_accepted

__all__ = [
    "Boxes",
    "DistributionFactory",
    "RecurrentSnapshot",
    "RecurrentState",
    "RecurrentToy",
    "RoundDistribution",
    "ScriptedContext",
    "ScriptedStream",
    "SoftmaxDistribution",
    "ToyCache",
    "ToyDrafter",
    "ToyModel",
    "check_draft",
    "check_drafter",
    "check_model",
    "check_verifier",
    "chi2",
    "chi2_p_value",
    "complete",
    "enumerate_round",
    "greedy_distribution",
    "last_accepted",
    "partition",
    "sample_rounds",
    "softmax_distribution",
    "target_distribution",
]

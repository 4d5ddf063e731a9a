"""Dead ends: positions at which a request's parameters left no token to sample.

Distributions mark such positions (``Prefix.dead_BM``). A position matters only if a token of the
output comes from it: one after a rejected token, or after the end of the output, is no error.

Legend: B rows, N nodes, K tokens emitted in a round.
"""

import torch
from torch import Tensor

from outrider.core import Round, cached_arange
from outrider.core.errors import DeadEndError
from outrider.engine.request import Row
from outrider.sampling.dead_end_cause import dead_end_cause


def first_dead(round_: Round, dead_BN: Tensor) -> Tensor:
    """The index of each row's first emitted token that comes from a distribution without tokens,
    (B,); tokens that the row does not keep are included. K if a row has none.

    Args:
        round_: the round.
        dead_BN: its nodes with such distributions.
    """
    K = round_.emitted_BK.shape[1]
    nodes_BK = torch.cat([torch.zeros_like(round_.emitted_BK[:, :1]), round_.verdict.path_BD], 1)
    dead_BK = dead_BN.gather(1, nodes_BK)
    return torch.where(dead_BK, cached_arange(K, dead_BK.device), K).amin(1)


def dead_end(round_: Round, b: int, row: Row, first: int, num_kept: int) -> DeadEndError:
    """The error for row ``b``, which kept ``num_kept`` tokens of a round, of which those from index
    ``first`` on could not be sampled."""
    request = row.request
    output = row.token_ids[: len(row.token_ids) - (num_kept - first)]
    node = int(round_.verdict.path_BD[b, first - 1]) if first else 0
    ids = [*request.first_ids, *output]
    logits_V = round_.scores.logits_BNV[b, node]
    culprit = dead_end_cause(request.sampling, logits_V, ids, len(request.first_ids))
    return DeadEndError(
        f"request {request.index}: no token can be sampled at position {len(ids)} (token "
        f"{len(output)} of the output): {culprit}; relax it, or end the output before that"
    )

"""Warns once that searches find fewer beams than they were asked for.

Top-k and top-p may leave fewer tokens than a search has beams. The search goes on with the beams
that exist. Only the device knows how many these are. The number stays there until the next round
begins; by then the host has waited for the device, so reading it costs no synchronisation of its
own. After the one warning it is not read again.

Legend: B rows, n beams.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.errors import OutriderWarning


class NarrowSearch:
    """Counts the beams of one drafter's searches.

    Args:
        beams: how many beams each search was asked for.
    """

    def __init__(self, beams: int) -> None:
        self._beams = beams
        self._fewest: Tensor | None = None
        self._said = False

    def watch(self, scores: Sequence[Tensor]) -> None:
        """Checks the search before this one, and remembers this one.

        Args:
            scores: scores of each step's beams, (B, n); -inf for beams that do not exist.
        """
        if self._said:
            return
        if self._fewest is not None:
            self._say(int(self._fewest))
        fewest = [(score_Bn > -torch.inf).sum(1).amin() for score_Bn in scores]
        self._fewest = torch.stack(fewest).amin()

    def _say(self, fewest: int) -> None:
        if fewest >= self._beams:
            return
        self._said = True
        warnings.warn(
            f"beams={self._beams}: a search found only {fewest}, as temperature, top-k or top-p "
            f"leave fewer tokens; it goes on with what there is (said once)",
            OutriderWarning,
            stacklevel=2,
        )

"""Says once that searches find fewer beams than they were asked for.

Top-k and top-p may leave fewer tokens than there are beams to fill. The search goes on with what
exists; how many that is only the device knows. So the number is left there, and looked at when the
next round begins: the host has waited for the device by then, and the look costs no wait of its
own. After the one warning nobody looks again.

Legend: B rows, n beams.
"""

import warnings
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider.core.errors import OutriderWarning


class NarrowSearch:
    """The watch over one drafter's searches.

    Args:
        beams: how many were asked for.
    """

    def __init__(self, beams: int) -> None:
        self._beams = beams
        self._fewest: Tensor | None = None
        self._said = False

    def watch(self, scores: Sequence[Tensor]) -> None:
        """Looks at the search before, and remembers this one.

        Args:
            scores: of each step's beams, (B, n); -inf for those that do not exist.
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

"""Log-probabilities of emitted tokens under the target itself.

They are the log softmax of the target's raw logits in float32, before temperature, truncation, bias
and penalties, whatever rule emitted the token.

Legend: B rows, K tokens emitted, V vocabulary, C top tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider.core import Round
from outrider.engine.request import TopLogprobs


@dataclass(frozen=True)
class Logprobs:
    """One round's log-probabilities, on the device; None where no row wants them.

    Attributes:
        chosen_BK: of the emitted tokens.
        top_BKC, top_ids_BKC: log-probabilities and ids of the best tokens at each position.
    """

    chosen_BK: Tensor | None = None
    top_BKC: Tensor | None = None
    top_ids_BKC: Tensor | None = None

    @classmethod
    def of(cls, round_: Round, wanted: Sequence[int | None]) -> Logprobs:
        """Computes what the rows want: None nothing, 0 the emitted tokens', n also the n best."""
        numbers = [n for n in wanted if n is not None]
        if not numbers:
            return cls()
        root_B1 = torch.zeros_like(round_.emitted_BK[:, :1])
        nodes_BK = torch.cat([root_B1, round_.verdict.path_BD], 1)
        logits_BNV = round_.scores.logits_BNV
        V = logits_BNV.shape[2]
        verified_BKV = logits_BNV.gather(1, nodes_BK[..., None].expand(-1, -1, V))
        logprobs_BKV = verified_BKV.to(torch.promote_types(verified_BKV.dtype, torch.float32))
        logprobs_BKV = logprobs_BKV.log_softmax(-1)
        chosen_BK = logprobs_BKV.gather(2, round_.emitted_BK[..., None])[..., 0]
        if max(numbers) == 0:
            return cls(chosen_BK)
        top = logprobs_BKV.topk(min(max(numbers), V), dim=-1)
        return cls(chosen_BK, top.values, top.indices)

    def blocks(self) -> list[Tensor]:
        """All numbers as blocks (B, ·) for the round's one device-to-host synchronisation."""
        if self.chosen_BK is None:
            return []
        if self.top_BKC is None or self.top_ids_BKC is None:
            return [self.chosen_BK]
        return [self.chosen_BK, self.top_BKC.flatten(1), self.top_ids_BKC.flatten(1)]

    def read(
        self, line: Sequence[list[float]], num_emitted: int, wanted: int | None
    ) -> tuple[list[float], list[TopLogprobs]]:
        """A row's log-probabilities and top tokens, from its line of the blocks."""
        if wanted is None or self.chosen_BK is None:
            return [], []
        chosen = line[0][:num_emitted]
        if wanted == 0 or self.top_BKC is None:
            return chosen, []
        C = self.top_BKC.shape[2]
        _, values, ids = line
        best = [slice(k * C, k * C + min(wanted, C)) for k in range(num_emitted)]
        return chosen, [
            TopLogprobs(tuple(int(i) for i in ids[part]), tuple(values[part])) for part in best
        ]

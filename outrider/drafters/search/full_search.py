"""Beam search over a whole output, drafted piece by piece: with ``Commit``, plain beam search.

The search is ``beam_search``, with the conventions of ``transformers``. It is the reference point
for everything that searches a few tokens at a time. It runs once per row, when the row begins, over
as many tokens as the row has room for: ``max_new_tokens``, or what is left of the context. Each
round then drafts the next γ + 1 tokens of the result. The target's forward pass over them decides
nothing; it gives the log-probabilities.

An output ends at the model's end-of-sequence tokens, unless the row ignores them, and at the row's
stop tokens. Stop strings cut the result and do not influence the search.

Rows are searched one after the other. The drafter reads the sampling parameters of the context's
distribution, which must be a ``Warp``. It needs no draft model.

Legend: B rows, N nodes, K tokens of a piece.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Scores, Stream, Verdict
from outrider.drafters.search.beam_search import EarlyStopping, beam_search, check_search
from outrider.runtime import HFModel
from outrider.runtime.hf.adapter import MARGIN
from outrider.sampling import Warp

DEPTH = 31
"""Tokens of a piece, less the one that every round emits beyond its draft."""


@dataclass
class Found:
    """What was found for each row: the position of its first token, and its tokens."""

    outputs: list[tuple[int, tuple[int, ...]]]

    def keep(self, rows: Sequence[int]) -> None:
        """Keeps these rows."""
        self.outputs = [self.outputs[row] for row in rows]


class FullSearchDrafter:
    """Drafts the continuation that beam search finds.

    Args:
        model: a second ``HFModel`` around the target's own module, with a cache of its own.
        num_beams: B, 1 or more; 1 is greedy decoding.
        length_penalty: exponent of the length; larger values favour longer outputs.
        early_stopping: when a search stops; see ``beam_search``.
        eos_ids: tokens that end an output.

    Raises:
        InvalidParameterError: a number out of range.
    """

    drawn: Drawn = "searched"

    def __init__(
        self,
        model: HFModel,
        num_beams: int = 8,
        length_penalty: float = 1.0,
        early_stopping: EarlyStopping = False,
        eos_ids: Collection[int] = (),
    ) -> None:
        check_search(num_beams, length_penalty, early_stopping)
        self.model = model
        self.num_beams = num_beams
        self.length_penalty = length_penalty
        self.early_stopping = early_stopping
        self.eos_ids = frozenset(eos_ids)

    @property
    def capabilities(self) -> Capabilities[HFModel]:
        return Capabilities(
            (self.model,), depth=DEPTH, max_nodes=lambda num_tokens: MARGIN, runs_trees=True
        )

    def start(self, context: Context) -> Found:
        return Found([(length, ()) for length in context.lengths])

    def propose(self, state: Found, context: Context, budget: Budget, rng: Stream) -> Draft:
        pieces = []
        for row, length in enumerate(context.lengths):
            first, tokens = state.outputs[row]
            if length - first >= len(tokens):
                first, tokens = state.outputs[row] = length, self._search(context, row)
            pieces.append(tokens[length - first :][: budget.max_tokens + 1])
        K = max(len(piece) for piece in pieces)
        padded = [[*piece, *[0] * (K - len(piece))] for piece in pieces]
        exists = [[True] * (len(piece) + 1) + [False] * (K - len(piece)) for piece in pieces]
        tokens_BK = torch.tensor(padded, device=context.device)
        tokens_BN = torch.cat([context.root_B[:, None], tokens_BK], 1)
        mask_BN = torch.tensor(exists, device=context.device)
        return Draft.chain(tokens_BN, mask_BN, None, "searched")

    def commit(self, state: Found, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Nothing: the context's lengths tell how many of the tokens were emitted."""

    def join(self, state: Found, other: Found) -> None:
        """Appends the rows of another state."""
        state.outputs = state.outputs + other.outputs

    def _search(self, context: Context, row: int) -> tuple[int, ...]:
        """The best continuation of a row."""
        assert isinstance(context.distribution, Warp)
        sampling, length = context.distribution.samplings[row], context.lengths[row]
        prompt_length = int(context.prompt_length_B[row])
        room = min(sampling.max_new_tokens + prompt_length, self.model.limit) - length
        ends = sampling.stop_token_ids | (frozenset() if sampling.ignore_eos else self.eos_ids)
        (best,) = beam_search(
            self.model,
            context.tokens_BT[row, :length].tolist(),
            self.num_beams,
            room,
            self.length_penalty,
            self.early_stopping,
            ends,
            sampling=sampling,
            prompt_length=prompt_length,
            source_ids=None if context.sources is None else context.sources[row],
        )
        return best.token_ids

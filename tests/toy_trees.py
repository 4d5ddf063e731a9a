"""Toy drafts of any shape: trees given by their parents, and several sequences from one root.

Legend: B rows, N nodes, D drafted tokens (N-1), V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from outrider.core import Budget, Capabilities, Context, Draft, Drawn, Stream, Verdict, row_keys
from outrider.core.draw import draw
from outrider.core.rng import Role
from outrider.testing import ToyDrafter, ToyModel
from outrider.testing.toy import ToyCache, prefix_of_node


class TreeDrafter(ToyDrafter):
    """A ``ToyDrafter`` whose tree has any shape; it wants ``num_tokens == len(parents)``.

    Args:
        model: the model that provides the logits.
        parents: parents of the nodes 1, 2, ….
        drawn: as for ``ToyDrafter``.
        confidence: as for ``ToyDrafter``.
        cover: where the distribution has no mass left, draw further distinct siblings uniformly
            from the remaining tokens (Sequoia).
    """

    def __init__(
        self,
        model: ToyModel,
        parents: Sequence[int],
        drawn: Drawn = "iid",
        *,
        confidence: float = 0.0,
        cover: bool = False,
    ) -> None:
        super().__init__(model, 1, drawn, confidence=confidence)
        self.parents = list(parents)
        self.cover = cover

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(drafts_trees=True)

    def grow(
        self, state: ToyCache, context: Context, budget: Budget, rng: Stream
    ) -> tuple[Draft, Tensor]:
        root_B = context.root_B
        parents_N = [-1, *self.parents[: budget.max_tokens]]
        B, N = len(root_B), len(parents_N)
        u_BD = rng.uniform(Role.DRAFT, max(N - 1, 1))
        limit_B = torch.full((B,), N - 1) if budget.tokens_B is None else budget.tokens_B
        parents_BN = torch.tensor(parents_N).expand(B, N)
        mask_BN = torch.ones(B, N, dtype=torch.bool)
        empty = Draft(root_B[:, None].expand(B, N), parents_BN, mask_BN, None, "chosen")

        tokens, pasts = [root_B], [self.model.read(state.past_B, root_B)]
        exists, grows = [mask_BN[:, 0]], [mask_BN[:, 0]]
        distributions: list[Tensor] = []
        for i in range(N):
            drafted_BK = torch.stack(tokens, 1)[:, 1:]
            prefix = prefix_of_node(context, drafted_BK, empty.ancestors_BNN, i)
            distributions.append(
                context.distribution(self.model.logits(pasts[i])[:, None], prefix)[:, 0]
            )
            if i + 1 == N:
                break
            parent = parents_N[i + 1]
            weights_BV, open_BV = distributions[parent], torch.ones_like(distributions[parent])
            if self.drawn != "iid":
                for sibling in range(1, i + 1):
                    if parents_N[sibling] == parent:
                        x_B1 = tokens[sibling][:, None]
                        weights_BV = weights_BV.scatter(1, x_B1, 0.0)
                        open_BV = open_BV.scatter(1, x_B1, 0.0)
            if self.cover:
                weights_BV = weights_BV.where(weights_BV.sum(1, keepdim=True) > 0, open_BV)
            token_B = (
                weights_BV.argmax(1) if self.drawn == "chosen" else draw(weights_BV, u_BD[:, i])
            )
            q_B = distributions[parent].gather(1, token_B[:, None])[:, 0]
            exists.append(grows[parent] & (weights_BV.sum(1) > 0) & (i < limit_B))
            grows.append(exists[-1] & (q_B >= self.confidence))
            tokens.append(token_B)
            pasts.append(self.model.read(pasts[parent], token_B))
        draft = replace(empty, tokens_BN=torch.stack(tokens, 1), mask_BN=torch.stack(exists, 1))
        return draft, torch.stack(distributions, 1)


def sequences(num: int, length: int, *, by_depth: bool = False) -> list[int]:
    """Parents of ``num`` chains of ``length`` tokens: one after the other, or depth by depth."""
    if by_depth:
        return [0] * num + list(range(1, num * (length - 1) + 1))
    return [0 if step == 0 else k * length + step for k in range(num) for step in range(length)]


def chain_of(tokens_BD: Tensor, q_BDV: Tensor) -> Draft:
    """A full chain after token 0; the leaf repeats the last q."""
    tokens_BN = torch.nn.functional.pad(tokens_BD, (1, 0))
    probs_BNV = torch.cat([q_BDV, q_BDV[:, -1:]], 1)
    return Draft.chain(tokens_BN, torch.ones_like(tokens_BN, dtype=torch.bool), probs_BNV, "iid")


def stream(num_rows: int, seed: int = 0) -> Stream:
    """A stream for the given number of rows."""
    key_B = row_keys([seed] * num_rows, list(range(num_rows)), "cpu")
    return Stream(key_B, torch.ones(num_rows, dtype=torch.int64))


def same(a: Verdict, b: Verdict, draft: Draft) -> bool:
    """Whether two verdicts emit the same tokens."""
    emitted_a_BK, emitted_b_BK = a.emitted(draft), b.emitted(draft)
    unread_BK = torch.arange(emitted_a_BK.shape[1]) > a.num_accepted_B[:, None]
    return bool(
        (a.num_accepted_B == b.num_accepted_B).all()
        and ((emitted_a_BK == emitted_b_BK) | unread_BK).all()
    )


def expected_tokens(paths: Sequence[Sequence[int]], acceptance: Sequence[float]) -> float:
    """F of a tree: tokens per round where the b-th child is accepted with ``acceptance[b-1]``.

    Ranks that were not measured are never accepted.
    """
    total = 1.0
    for path in paths:
        product = 1.0
        for rank in path:
            product *= acceptance[rank] if rank < len(acceptance) else 0.0
        total += product
    return total

"""Equal siblings share a column of the pass, and what hangs on them does.

Legend: B rows, N nodes, M columns.
"""

import torch

from outrider.core import Draft
from outrider.core.columns import Columns


def random_draft(seed: int, B: int = 3, N: int = 13, num_tokens: int = 3) -> Draft:
    """Ragged rows of different trees over few tokens."""
    generator = torch.Generator().manual_seed(seed)
    back_BN = torch.randint(1, 5, (B, N), generator=generator)
    parents_BN = (torch.arange(N) - back_BN).clamp(min=0)
    parents_BN[:, 0] = -1
    tokens_BN = torch.randint(num_tokens, (B, N), generator=generator)
    mask_BN = torch.arange(N) <= torch.randint(N, (B, 1), generator=generator)
    return Draft(tokens_BN, parents_BN, mask_BN, None, "iid")


def test_one_column_per_path_of_tokens() -> None:
    """Against paths followed one node at a time."""
    for seed in range(100):
        draft = random_draft(seed)
        columns = draft.columns
        widths = []
        for b in range(len(draft.tokens_BN)):
            paths: dict[int, tuple[int, ...]] = {-1: ()}
            seen: dict[tuple[int, ...], int] = {}
            for i in range(draft.num_nodes):
                if draft.mask_BN[b, i]:
                    above = paths[int(draft.parents_BN[b, i])]
                    paths[i] = (*above, int(draft.tokens_BN[b, i]))
                    seen.setdefault(paths[i], len(seen))
            widths.append(len(seen))
            if columns.node_BM.shape[1] == draft.num_nodes:
                continue
            for i in range(draft.num_nodes):
                path = paths.get(i, paths[0])
                m = int(columns.column_BN[b, i])
                assert m == seen[path]
                assert paths[int(columns.node_BM[b, m])] == path
                assert int(columns.depth_BM[b, m]) == len(path) - 1
                above_M = columns.ancestors_BMM[b, m].nonzero()[:, 0].tolist()
                assert above_M == sorted(seen[path[:n]] for n in range(1, len(path) + 1))
        assert columns.node_BM.shape[1] in (max(widths), draft.num_nodes)
        assert columns.node_BM.shape[1] == max(widths)


def test_nothing_is_merged_where_siblings_differ_by_their_kind() -> None:
    draft = random_draft(1)
    for drawn in ("distinct", "chosen", "searched"):
        other = Draft(draft.tokens_BN, draft.parents_BN, draft.mask_BN, None, drawn)
        assert other.columns.node_BM.shape == draft.tokens_BN.shape


def test_a_row_that_merges_beside_one_that_does_not() -> None:
    """As many columns as nodes, and yet two nodes of one row with the same path: each is kept."""
    tokens_BN = torch.tensor([[0, 1, 2], [0, 1, 1]])
    parents_BN = torch.tensor([[-1, 0, 0], [-1, 0, 0]])
    draft = Draft(tokens_BN, parents_BN, torch.ones_like(tokens_BN).bool(), None, "iid")
    said_BMV = torch.arange(12.0).view(2, 3, 2)
    assert draft.columns.spread(said_BMV) is said_BMV
    merged = Columns.merged(Draft(tokens_BN[1:], parents_BN[1:], draft.mask_BN[1:], None, "iid"))
    assert merged.spread(said_BMV[1:, :2]).tolist() == [[[6, 7], [8, 9], [8, 9]]]

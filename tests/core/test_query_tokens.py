"""Equal siblings share a query token, and so do their descendants with equal paths.

Legend: B rows, N nodes, Q query tokens, V vocabulary.
"""

import torch

from outrider.core import Draft
from outrider.core.query_tokens import QueryTokens


def random_draft(seed: int, B: int = 3, N: int = 13, num_tokens: int = 3) -> Draft:
    """Ragged rows of different trees over few tokens."""
    generator = torch.Generator().manual_seed(seed)
    back_BN = torch.randint(1, 5, (B, N), generator=generator)
    parents_BN = (torch.arange(N) - back_BN).clamp(min=0)
    parents_BN[:, 0] = -1
    tokens_BN = torch.randint(num_tokens, (B, N), generator=generator)
    mask_BN = torch.arange(N) <= torch.randint(N, (B, 1), generator=generator)
    return Draft(tokens_BN, parents_BN, mask_BN, None, "iid")


def test_one_query_token_per_path_of_tokens() -> None:
    """Compared with paths followed one node at a time."""
    for seed in range(100):
        draft = random_draft(seed)
        query_tokens = draft.query_tokens
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
            if query_tokens.node_BQ.shape[1] == draft.num_nodes:
                continue
            for i in range(draft.num_nodes):
                path = paths.get(i, paths[0])
                index = int(query_tokens.index_BN[b, i])
                assert index == seen[path]
                assert paths[int(query_tokens.node_BQ[b, index])] == path
                assert int(query_tokens.depth_BQ[b, index]) == len(path) - 1
                above = query_tokens.ancestors_BQQ[b, index].nonzero()[:, 0].tolist()
                assert above == sorted(seen[path[:n]] for n in range(1, len(path) + 1))
        assert query_tokens.node_BQ.shape[1] in (max(widths), draft.num_nodes)
        assert query_tokens.node_BQ.shape[1] == max(widths)


def test_the_host_merges_as_tensors_do() -> None:
    """To the entry, in rows that need fewer query tokens than others, too."""
    merged = 0
    for seed in range(200):
        draft = random_draft(seed, B=1 + seed % 4, N=2 + seed % 17, num_tokens=2 + seed % 5)
        structure = draft.ancestors_BNN, draft.depth_BN
        wanted = QueryTokens.one_per_path(draft.tokens_BN, draft.mask_BN, *structure)
        found = draft.query_tokens
        for name in ("node_BQ", "index_BN", "ancestors_BQQ", "depth_BQ"):
            one, other = getattr(found, name), getattr(wanted, name)
            assert one.dtype == other.dtype
            assert torch.equal(one, other), name
        merged += found.node_BQ.shape[1] < draft.num_nodes
    assert merged > 150


def test_only_iid_drafts_are_merged() -> None:
    draft = random_draft(1)
    for drawn in ("distinct", "chosen", "searched"):
        other = Draft(draft.tokens_BN, draft.parents_BN, draft.mask_BN, None, drawn)
        assert other.query_tokens.node_BQ.shape == draft.tokens_BN.shape


def test_one_row_with_equal_siblings_beside_one_without() -> None:
    """The other row needs a query token per node, so both equal siblings keep theirs."""
    tokens_BN = torch.tensor([[0, 1, 2], [0, 1, 1]])
    parents_BN = torch.tensor([[-1, 0, 0], [-1, 0, 0]])
    draft = Draft(tokens_BN, parents_BN, torch.ones_like(tokens_BN).bool(), None, "iid")
    logits_BQV = torch.arange(12.0).view(2, 3, 2)
    assert draft.query_tokens.to_nodes(logits_BQV) is logits_BQV
    alone = Draft(tokens_BN[1:], parents_BN[1:], draft.mask_BN[1:], None, "iid")
    assert alone.query_tokens.to_nodes(logits_BQV[1:, :2]).tolist() == [[[6, 7], [8, 9], [8, 9]]]

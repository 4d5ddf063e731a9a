"""Chains and trees are verified by the same rules, in any batch."""

from dataclasses import replace

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.core import (
    Draft,
    Role,
    Stream,
    at_node,
    draw,
    path_to,
    row_keys,
    walk_chain,
    walk_down,
    walk_tree,
)
from outrider.verifiers import Distinct, Greedy, Rejection


def random_distributions(generator, *shape, zeros):
    weights = torch.rand(*shape, generator=generator, dtype=torch.float64)
    weights = weights * (torch.rand(*shape, generator=generator) >= zeros)
    weights[..., 0] += 1e-3
    return weights / weights.sum(-1, keepdim=True)


def random_chain(seed, B, D, V, drawn, zeros):
    """A batch of ragged chains with their target distributions."""
    generator = torch.Generator().manual_seed(seed)
    p_BNV = random_distributions(generator, B, D + 1, V, zeros=zeros)
    q_BNV = random_distributions(generator, B, D + 1, V, zeros=zeros)
    tokens_BD = q_BNV[:, :-1].reshape(-1, V).multinomial(1, generator=generator).view(B, D)
    tokens_BN = torch.cat([torch.zeros(B, 1, dtype=torch.int64), tokens_BD], 1)
    num_drafted_B = torch.randint(D + 1, (B,), generator=generator)
    mask_BN = torch.arange(D + 1) <= num_drafted_B[:, None]
    probs_BNV = None if drawn == "chosen" else q_BNV
    rng = Stream(row_keys([seed] * B, list(range(B)), "cpu"), torch.arange(B))
    return Draft.chain(tokens_BN, mask_BN, probs_BNV, drawn), p_BNV, rng


def random_tree(seed, B, N, V, drawn, zeros):
    """A batch of ragged trees, different in each row, with their target distributions."""
    generator = torch.Generator().manual_seed(seed)
    p_BNV = random_distributions(generator, B, N, V, zeros=zeros)
    q_BNV = random_distributions(generator, B, N, V, zeros=zeros)
    back_BN = torch.randint(1, 4, (B, N), generator=generator)
    parents_BN = (torch.arange(N) - back_BN).clamp(min=0)
    parents_BN[:, 0] = -1
    tokens_BN = torch.randint(V, (B, N), generator=generator)
    if drawn == "distinct":
        tokens_BN = (torch.arange(N) + tokens_BN[:, :1]) % V
    mask_BN = torch.rand(B, N, generator=generator) < 0.8
    mask_BN[:, 0] = True
    for i in range(1, N):
        mask_BN[:, i] &= mask_BN.gather(1, parents_BN[:, i : i + 1])[:, 0]
    probs_BNV = None if drawn == "chosen" else q_BNV
    rng = Stream(row_keys([seed] * B, list(range(B)), "cpu"), torch.arange(B))
    return Draft(tokens_BN, parents_BN, mask_BN, probs_BNV, drawn), p_BNV, rng


def walk_node_by_node(rule, draft, p_BNV, rng):
    """Reference implementation of ``walk_tree``: row by row, node by node in index order."""
    B, N = draft.tokens_BN.shape
    u_BD, w_B = rng.uniform(Role.ACCEPT, N - 1), rng.uniform(Role.NEXT, 1)[:, 0]
    told = []
    for b in range(B):
        node, path, p_V = 0, [], p_BNV[b, 0]
        q_V = None if draft.probs_BNV is None else draft.probs_BNV[b, 0]
        for i in range(1, N):
            if draft.parents_BN[b, i] != node or not draft.mask_BN[b, i]:
                continue
            if rule.accept(p_V, q_V, draft.tokens_BN[b, i], u_BD[b, i - 1]):
                node, p_V = i, p_BNV[b, i]
                q_V = None if draft.probs_BNV is None else draft.probs_BNV[b, i]
                path.append(i)
            else:
                left_V, q_V = rule.reject(p_V, q_V, draft.tokens_BN[b, i])
                left_V = left_V if left_V.sum() > 0 else p_V
                p_V = left_V / left_V.sum()
        tokens = [int(draft.tokens_BN[b, i]) for i in path]
        told.append(([*tokens, int(draw(p_V[None], w_B[b : b + 1]))], path))
    return told


def decisions(verdict, draft):
    n = verdict.num_accepted_B
    return [
        (row[: k + 1], path[:k])
        for row, path, k in zip(
            verdict.emitted(draft).tolist(), verdict.path_BD.tolist(), n.tolist(), strict=True
        )
    ]


chains = st.tuples(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 6),
    st.integers(2, 6),
    st.sampled_from(["iid", "chosen"]),
    st.sampled_from([0.0, 0.5]),
)


@settings(deadline=None)
@given(chains)
def test_a_chain_is_verified_like_a_tree(parameters):
    draft, p_BNV, rng = random_chain(*parameters)
    as_chain = decisions(walk_chain(Rejection(), draft, p_BNV, rng), draft)
    assert as_chain == decisions(walk_tree(Rejection(), draft, p_BNV, rng), draft)


@settings(deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(2, 12),
    st.integers(3, 5),
    st.sampled_from(["iid", "distinct", "chosen"]),
    st.sampled_from([0.0, 0.5]),
)
def test_walk_tree_equals_a_walk_node_by_node(seed, B, N, V, drawn, zeros):
    draft, p_BNV, rng = random_tree(seed, B, N, V, drawn, zeros)
    rule = Distinct() if drawn == "distinct" else Rejection()
    plain = walk_node_by_node(rule, draft, p_BNV, rng)
    assert decisions(walk_tree(rule, draft, p_BNV, rng), draft) == plain
    known = replace(draft, max_walk_length=int(draft.walk_step_BN.max()))
    assert decisions(walk_tree(rule, known, p_BNV, rng), known) == plain


def test_a_walk_asks_only_for_the_nodes_that_it_reaches() -> None:
    """The root, and one node per accepted token, of each row that still walks."""
    for seed in range(40):
        draft, p_BNV, rng = random_tree(seed, 1, 12, 4, "iid", 0.0)
        asked = []

        def p_at(node_B, p_BNV=p_BNV, asked=asked):
            asked.append(int(node_B))
            return at_node(p_BNV, node_B)

        verdict = walk_down(Rejection(), draft, p_at, rng)
        assert decisions(verdict, draft) == decisions(
            walk_tree(Rejection(), draft, p_BNV, rng), draft
        )
        assert asked == [0, *verdict.path_BD[0, : int(verdict.num_accepted_B)].tolist()]


def test_walk_step_counts_the_nodes_visited_before():
    parents_BN = torch.tensor([[-1, 0, 0, 1, 1, 3, 2, 0]])
    ones_BN = torch.ones_like(parents_BN)
    draft = Draft(ones_BN, parents_BN, ones_BN.bool(), None, "chosen")
    assert draft.walk_step_BN.tolist() == [[0, 1, 2, 2, 3, 3, 3, 3]]


@settings(deadline=None)
@given(chains)
def test_greedy_verifies_a_chain_like_a_tree(parameters):
    draft, p_BNV, rng = random_chain(*parameters)
    tree = replace(draft, is_chain=False)
    as_chain = decisions(Greedy()(draft, p_BNV, rng), draft)
    assert as_chain == decisions(Greedy()(tree, p_BNV, rng), tree)


@settings(deadline=None)
@given(chains)
def test_rejection_stops_where_a_plain_loop_stops(parameters):
    """Leviathan et al., Algorithm 1, row by row."""
    draft, p_BNV, rng = random_chain(*parameters)
    verdict = Rejection()(draft, p_BNV, rng)
    u_BD, w_B1 = rng.uniform(Role.ACCEPT, draft.num_nodes - 1), rng.uniform(Role.NEXT, 1)
    for b in range(len(p_BNV)):
        n, gamma = 0, int(draft.num_drafted_B[b])
        probs_V = None
        while n < gamma:
            x, p_V = int(draft.tokens_BN[b, n + 1]), p_BNV[b, n]
            q_V = torch.eye(len(p_V), dtype=p_V.dtype)[x]
            if draft.probs_BNV is not None:
                q_V = draft.probs_BNV[b, n]
            if not u_BD[b, n] * q_V[x] < p_V[x]:
                probs_V = (
                    (p_V - q_V).clamp(min=0) if draft.probs_BNV is not None else p_V * (q_V < 1)
                )
                break
            n += 1
        next_token = draw((p_BNV[b, n] if probs_V is None else probs_V)[None], w_B1[b])
        assert int(verdict.num_accepted_B[b]) == n
        assert int(verdict.next_token_B[b]) == int(next_token)


def test_path_to_climbs_to_the_root():
    parents_BN = torch.tensor([[-1, 0, 0, 1, 1, 3, 2]])
    ones_BN = torch.ones_like(parents_BN)
    draft = Draft(ones_BN, parents_BN, ones_BN.bool(), None, "chosen")
    for node, path in {0: [], 2: [2], 5: [1, 3, 5], 4: [1, 4], 6: [2, 6]}.items():
        assert path_to(draft, torch.tensor([node]))[0, : len(path)].tolist() == path
    assert draft.depth_BN.tolist() == [[0, 1, 1, 2, 2, 3, 2]]


def test_equal_distributions_accept_everything():
    draft, p_BNV, rng = random_chain(3, 64, 5, 4, "iid", 0.3)
    draft = replace(draft, probs_BNV=p_BNV)
    tokens_BD = p_BNV[:, :-1].reshape(-1, 4).multinomial(1).view(64, 5)
    draft = replace(draft, tokens_BN=torch.cat([draft.tokens_BN[:, :1], tokens_BD], 1))
    assert (Rejection()(draft, p_BNV, rng).num_accepted_B == draft.num_drafted_B).all()


def test_siblings_follow_the_order_of_their_draws():
    """The rule takes the first of equal siblings."""
    tokens_BN = torch.tensor([[0, 2, 1, 2]])
    parents_BN = torch.tensor([[-1, 0, 0, 0]])
    draft = Draft(tokens_BN, parents_BN, torch.ones_like(tokens_BN).bool(), None, "chosen")
    p_BNV = torch.eye(3).double()[[2, 0, 0, 0]][None]
    rng = Stream(torch.tensor([1]), torch.tensor([1]))
    verdict = Greedy()(draft, p_BNV, rng)
    assert verdict.path_BD[0, 0] == 1
    assert verdict.num_accepted_B.tolist() == [1]

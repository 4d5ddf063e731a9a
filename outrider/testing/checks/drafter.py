"""What every drafter promises: well-formed drafts within budget, drawn from the declared
distributions, and no more than its capabilities declare.

Legend: B rows, T context length, N nodes, D drafted tokens (N-1), X selected nodes of all rows, V
vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import torch

from outrider.core import (
    Budget,
    Capabilities,
    Context,
    Distribution,
    Draft,
    Drafter,
    Drawn,
    Lengths,
    Model,
    Scores,
    row_keys,
    start_batch,
)
from outrider.testing.checks._common import advance, holds, random_prompts, require, verdict_at
from outrider.testing.enumerate import DistributionFactory, ScriptedContext, softmax_distribution


def check_drafter(
    drafter: Drafter[Any],
    vocab_size: int,
    num_tokens: int = 4,
    *,
    distribution: DistributionFactory = softmax_distribution,
    num_samples: int = 4096,
    prompts: Sequence[Sequence[int]] | None = None,
    device: torch.device | str = "cpu",
    seed: int = 0,
    target: Model[Any] | None = None,
) -> None:
    """A drafter's drafts are well formed, within budget, drawn from the distributions they
    declare, and no larger than its capabilities say.

    To test that ``probs`` is the distribution that tokens are really drawn from, the check counts
    the tokens of ``num_samples`` drafts of one prompt, per node and per preceding token. A correct
    drafter fails with probability below 1e-6. Pass 0 to skip this test. Chosen and searched tokens
    are not draws and are not counted.

    Args:
        drafter: the drafter.
        vocab_size: size of the vocabulary.
        num_tokens: the draft budget.
        distribution: returns the context's distribution for a number of rows.
        num_samples: number of drafts to count.
        prompts: the prompts of the rows, two or more; random and ragged if None.
        device: the device of the contexts.
        seed: seed of prompts and draws.
        target: the target, for a drafter that reads its hidden states.

    Raises:
        AssertionError: the message names the violated guarantee.
    """
    generator = torch.Generator().manual_seed(seed)
    prompts = prompts or random_prompts(vocab_size, generator)
    B = len(prompts)

    def batch(rows: Sequence[int]) -> Context:
        return Context.start(
            [prompts[row] for row in rows],
            distribution(len(rows)),
            [seed] * len(rows),
            rows,
            device,
        )

    def start(context: Context) -> Any:
        if target is None:
            return drafter.start(context)
        return start_batch(context, target, drafter)[1]

    def scores(context: Context, draft: Draft) -> Scores:
        if target is None:
            return _scores(draft, vocab_size)
        return target.score(target.start(context), draft)

    def propose(context: Context, state: Any, tokens: Sequence[int] | None = None) -> Draft:
        row_tokens_B = None if tokens is None else torch.tensor(tokens, device=device)
        budget = Budget(num_tokens if tokens is None else max(tokens), row_tokens_B)
        draft = drafter.propose(state, context, budget, context.rng)
        check_draft(draft, context, budget, vocab_size, drafter.drawn)
        _check_capabilities(draft, budget, drafter.capabilities)
        return draft

    context = batch(range(B))
    state = start(context)
    draft = propose(context, state)
    _same(draft, propose(context, state), range(B), "a second propose changed the draft")
    ragged = [(b + 1) % (num_tokens + 1) for b in range(B)]
    propose(context, state, [*ragged[:-1], num_tokens])

    for round_ in range(2):
        for row in range(B):
            alone = _only(context, row, distribution(1))
            alone_draft = propose(alone, start(alone))
            what = "a row alone gets a different draft than" + (
                " in its batch" if round_ == 0 else " after commit: state and context disagree"
            )
            _same(draft, alone_draft, [row], what, other_rows=[0])
        node_B = torch.arange(B, device=device) % draft.num_nodes
        next_B = torch.randint(vocab_size, (B,), generator=generator).to(device)
        verdict = verdict_at(draft, node_B, next_B)
        drafter.commit(state, draft, verdict, scores(context, draft))
        advance(context, draft, verdict)
        draft = propose(context, state)

    if drafter.capabilities.rewindable:
        lengths = [max(length - 2, 1) for length in context.lengths]
        state.rollback(Lengths.of(lengths, device))
        again = propose(context, state)
        _same(again, draft, range(B), "a rollback, and reading the tokens again, changed the draft")

    kept = [B - 1, *range(1, B - 1)] if B > 2 else [B - 1]
    state.keep(kept)
    context.keep(kept)
    newcomers = batch([0, 1])
    joining = start(newcomers)
    context.join(newcomers)
    context.distribution = distribution(context.num_rows)
    drafter.join(state, joining)
    joined = propose(context, state)
    _same(joined, draft, range(len(kept)), "keep or join changed a row's draft", other_rows=kept)

    state.keep([])  # this is how a batch ends

    if num_samples and drafter.drawn in ("iid", "distinct"):
        key_B = row_keys([seed] * num_samples, list(range(num_samples)), device)
        many = ScriptedContext.repeat(prompts[-1], num_samples, distribution, key_B, device)
        _check_draws(propose(many, start(many)))


def check_draft(
    draft: Draft, context: Context, budget: Budget, vocab_size: int, drawn: Drawn
) -> None:
    """Checks that a draft is well-formed: shapes, order, mask, budget and distributions.

    Raises:
        AssertionError: the message names the violated guarantee.
    """
    B, N = draft.tokens_BN.shape
    require(context.num_rows == B, f"draft has {B} rows, the context {context.num_rows}")
    for name in ("parents_BN", "mask_BN"):
        shape = tuple(getattr(draft, name).shape)
        require(shape == (B, N), f"{name} has shape {shape}, tokens_BN {(B, N)}")
    require(draft.drawn == drawn, f"the draft declares {draft.drawn!r}, the drafter {drawn!r}")
    require(draft.mask_BN.dtype == torch.bool, "mask_BN is not bool")
    require(holds(draft.tokens_BN[:, 0] == context.root_B), "node 0 is not the last token")
    require(holds(draft.mask_BN[:, 0]), "the root of a row does not exist")
    require(holds(draft.parents_BN[:, 0] == -1), "the root's parent is not -1")
    node_N = torch.arange(N, device=draft.tokens_BN.device)
    parents_BD = draft.parents_BN[:, 1:]
    in_order = (parents_BD >= 0) & (parents_BD < node_N[1:])
    require(holds(in_order), "nodes are not in topological order")
    if draft.is_chain:
        require(
            holds(draft.parents_BN == node_N - 1), "is_chain is set, but the draft is not a chain"
        )
    orphan_BD = draft.mask_BN[:, 1:] & ~draft.mask_BN.gather(1, parents_BD)
    require(not bool(orphan_BD.any()), "a node exists whose parent does not")
    tokens_BN = draft.tokens_BN[draft.mask_BN]
    require(holds((tokens_BN >= 0) & (tokens_BN < vocab_size)), "token ids out of range")
    if draft.is_chain:
        require(max(budget.max_tokens, 0) >= N - 1, f"{N - 1} nodes exceed {budget.max_tokens}")
    deepest_B = draft.depth_BN.where(draft.mask_BN, 0).amax(1)
    require(holds(deepest_B <= budget.max_tokens), f"a path exceeds {budget.max_tokens} tokens")
    if budget.tokens_B is not None:
        within = deepest_B <= budget.tokens_B.to(deepest_B.device)
        require(holds(within), "a row exceeds its own budget")
    require((draft.probs_BNV is None) == (drawn == "chosen"), "probs is None iff chosen")
    if draft.probs_BNV is None:
        return
    require(draft.probs_BNV.shape[:2] == (B, N), f"probs_BNV: shape {draft.probs_BNV.shape}")
    rows_BD = torch.arange(B, device=parents_BD.device)[:, None].expand_as(parents_BD)
    q_XV = draft.probs_BNV[rows_BD, parents_BD][draft.mask_BN[:, 1:]]
    require(holds(q_XV >= 0), "a draft distribution is negative somewhere")
    off = (q_XV.double().sum(1) - 1).abs()
    require(holds(off < 1e-4), "a draft distribution does not sum to one")
    drawn_X = draft.tokens_BN[:, 1:][draft.mask_BN[:, 1:]]
    require(holds(q_XV.gather(1, drawn_X[:, None]) > 0), "a drawn token has q = 0")
    if drawn in ("distinct", "searched"):
        same_BNN = (draft.tokens_BN[:, :, None] == draft.tokens_BN[:, None]) & (
            draft.parents_BN[:, :, None] == draft.parents_BN[:, None]
        )
        both_BNN = draft.mask_BN[:, :, None] & draft.mask_BN[:, None]
        require(not bool((same_BNN & both_BNN).tril(-1).any()), f"{drawn} siblings are equal")


def _check_capabilities(draft: Draft, budget: Budget, able: Capabilities[Any]) -> None:
    """A draft is no larger than its drafter declares, and a tree only if it declares trees."""
    N, most = draft.num_nodes, able.max_nodes(budget.max_tokens)
    require(most >= N, f"{N} nodes, where the capabilities declare at most {most}")
    require(draft.is_chain or able.drafts_trees, "a tree, where the capabilities declare chains")


def _check_draws(draft: Draft) -> None:
    """Compares counts of drawn tokens with the declared distributions by z-tests.

    There is one test per node, condition and token; the condition is the parent's token, or the
    token of the preceding node. Tests with a variance below 25 are skipped. The others exceed 7.5
    standard deviations with a probability of 2e-10 each, and there are a few hundred per node.
    """
    assert draft.probs_BNV is not None
    rows_B = torch.arange(draft.tokens_BN.shape[0], device=draft.tokens_BN.device)
    for i in range(1, draft.num_nodes):
        parent_B, exists_B = draft.parents_BN[:, i], draft.mask_BN[:, i]
        q_BV = draft.probs_BNV[rows_B, parent_B].double()
        for j in range(1, i) if draft.drawn == "distinct" else ():
            sibling_B = (draft.parents_BN[:, j] == parent_B) & draft.mask_BN[:, j]
            without_BV = q_BV.scatter(1, draft.tokens_BN[:, j, None], 0.0)
            q_BV = torch.where(sibling_B[:, None], without_BV, q_BV)
        q_BV = q_BV / q_BV.sum(1, keepdim=True).clamp(min=1e-300)
        for given_B in (draft.tokens_BN[rows_B, parent_B], draft.tokens_BN[:, i - 1]):
            for value in given_B.unique().tolist()[:8]:
                selected_B = exists_B & (given_B == value)
                q_XV, x_X = q_BV[selected_B], draft.tokens_BN[selected_B, i]
                count_V = torch.bincount(x_X, minlength=q_XV.shape[1])
                variance_V = (q_XV * (1 - q_XV)).sum(0)
                z_V = (count_V - q_XV.sum(0)).abs() / variance_V.clamp(min=1e-300).sqrt()
                worst = float(z_V.where(variance_V >= 25, 0.0).max())
                require(
                    worst < 7.5,
                    f"node {i}: tokens are not drawn from the declared probs "
                    f"({worst:.1f} standard deviations off)",
                )


def _scores(draft: Draft, vocab_size: int) -> Scores:
    return Scores(torch.zeros(*draft.tokens_BN.shape, vocab_size, device=draft.tokens_BN.device))


def _only(context: Context, row: int, distribution: Distribution) -> Context:
    length = context.lengths[row]
    return Context(
        context.tokens_BT[row : row + 1, : length + 64],
        Lengths([length], context.length_B[row : row + 1]),
        context.prompt_length_B[row : row + 1],
        context.key_B[row : row + 1],
        distribution,
    )


def _same(
    draft: Draft,
    other: Draft,
    rows: Sequence[int],
    what: str,
    other_rows: Sequence[int] | None = None,
) -> None:
    """Requires existing nodes to have equal tokens and parents; the padding may differ."""
    for row, other_row in zip(rows, rows if other_rows is None else other_rows, strict=True):
        mine, theirs = _nodes(draft, row), _nodes(other, other_row)
        require(mine == theirs, f"{what} (row {row}: {mine} and {theirs})")


def _nodes(draft: Draft, row: int) -> list[tuple[int, int]]:
    mask_N = draft.mask_BN[row]
    tokens, parents = draft.tokens_BN[row][mask_N], draft.parents_BN[row][mask_N]
    return list(zip(tokens.tolist(), parents.tolist(), strict=True))

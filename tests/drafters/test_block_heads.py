"""DFlash and DSpark heads: what they draft from equals the head computed anew over the true hidden
states, the output keeps the target's distribution, and wrong alignments are found.

Legend: B rows, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from tiny_block_heads import DSPARK, reference_block, reference_logits, tiny_block_head
from tiny_heads import started, target_of
from tiny_models import ragged_prompts
from torch import Tensor

from outrider import Sampling
from outrider.core import Budget, Context, Draft, Scores, commit_round, run_round
from outrider.core.errors import IncompatibleError
from outrider.drafters.chain.stop import Confidence, Survival
from outrider.drafters.heads import block
from outrider.drafters.heads.block import BlockDrafter
from outrider.drafters.heads.newest import at_last
from outrider.drafters.tree.topology import Topology
from outrider.sampling import Warp
from outrider.testing import check_drafter, chi2, enumerate_round
from outrider.verifiers import Distinct, Rejection

TARGET = target_of(dtype=torch.float64)
V = TARGET.num_tokens
TOY = target_of(3, dtype=torch.float64, std=0.25)
KINDS = [{}, {"sample_from_anchor": True}, DSPARK, DSPARK | {"confidence_reads_markov": False}]
TREE = Topology.expansion([2, 2])


def warp(rows: int, num_tokens: int = V, temperature: float = 0.9) -> Warp:
    return Warp([Sampling(temperature=temperature)] * rows, num_tokens)


def with_states(target: Any, drafter: BlockDrafter) -> Any:
    return target.with_hidden_states(drafter.capabilities.hidden_layers)


def expected(head: Any, context: Context, draft: Draft) -> Tensor:
    """q of every node, (B, N, V), from the head computed anew."""
    rows = []
    for b, length in enumerate(context.lengths):
        tokens = context.tokens_BT[b, :length].tolist()
        nodes = []
        for i in range(draft.num_nodes):
            path = draft.ancestors_BNN[b, i, 1:].nonzero()[:, 0] + 1
            drafted = draft.tokens_BN[b, path].tolist()
            if len(drafted) < head.config.num_slots:
                nodes.append((reference_logits(head, TARGET, tokens, drafted) / 0.9).softmax(-1))
            else:
                nodes.append(torch.zeros(V, dtype=torch.float64))
        rows.append(torch.stack(nodes))
    return torch.stack(rows)


def rounds(
    drafter: BlockDrafter, head: Any, prompts: Sequence[Sequence[int]], num: int, width: int = 512
) -> list[tuple[Tensor, Draft]]:
    """The q that some rounds should have drafted from, and their drafts."""
    rule = Rejection() if drafter.drawn == "iid" else Distinct()
    target, context, cache, state = started(drafter, TARGET, prompts, warp(len(prompts)), width)
    found = []
    for _ in range(num):
        parts = context, target, cache, drafter, state
        round_ = run_round(*parts, rule, Budget(5))
        found.append((expected(head, context, round_.proposed), round_.proposed))
        commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())
    return found


@torch.inference_mode()
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("size", [V, 17])
def test_drafts_from_the_head_over_the_true_hidden_states(
    options: dict[str, Any], size: int
) -> None:
    """Ragged rows, prompts read in passes of three tokens, four rounds: q of every drafted token
    is that of a pass without a cache, up to the float32 of norms and angles."""
    head = tiny_block_head(TARGET, size, **options)
    drafter = BlockDrafter(head, TARGET)
    accepted = 0
    for q_BNV, draft in rounds(drafter, head, ragged_prompts([9, 1, 6], V), 4, width=3):
        assert draft.num_nodes == head.config.num_slots + 1 == 5 - head.config.first_slot
        assert draft.probs_BNV is not None
        assert (draft.probs_BNV[..., : V - size] == 0).all()
        torch.testing.assert_close(draft.probs_BNV, q_BNV, rtol=1e-5, atol=1e-6)
        accepted += draft.num_nodes
    assert accepted


@torch.inference_mode()
@pytest.mark.parametrize(
    "settings",
    [{"temperature": 0.0}, {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "min_p": 0.02}],
    ids=["greedy", "truncated"],
)
def test_drawing_within_a_reduced_vocabulary_changes_nothing(settings: dict[str, Any]) -> None:
    """A bias of 0 has the logits widened first: the same tokens, from the same distributions."""
    drafter = BlockDrafter(tiny_block_head(TARGET, 17, **DSPARK), TARGET)
    prompts = ragged_prompts([9, 1, 6] * 8, V)
    drafts = []
    for bias in ({}, {3: 0.0}):
        distribution = Warp([Sampling(logit_bias=bias, **settings)] * len(prompts), V)
        assert distribution.keeps_logits == (not bias)
        _, context, _, state = started(drafter, TARGET, prompts, distribution)
        drafts.append(drafter.propose(state, context, Budget(4), context.rng))
    within, wide = drafts
    assert torch.equal(within.tokens_BN, wide.tokens_BN)
    assert (within.probs_BNV is None) == (settings["temperature"] == 0)
    if within.probs_BNV is not None:
        torch.testing.assert_close(within.probs_BNV, wide.probs_BNV)


@torch.inference_mode()
@pytest.mark.parametrize("options", KINDS, ids=str)
def test_a_tree_drafts_from_the_head_over_the_true_hidden_states(options: dict[str, Any]) -> None:
    """Every inner node of a static tree; its paths are accepted and gathered in between."""
    head = tiny_block_head(TARGET, 17, **options)
    drafter = BlockDrafter(head, TARGET, topology=TREE)
    inner = [i for i in range(TREE.num_nodes) if TREE.num_children[i]]
    for q_BNV, draft in rounds(drafter, head, ragged_prompts([9, 3, 6], V), 4):
        assert draft.probs_BNV is not None
        found, wanted = draft.probs_BNV[:, inner], q_BNV[:, inner]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("options", KINDS, ids=str)
@pytest.mark.parametrize("topology", [None, TREE], ids=["chain", "tree"])
def test_contract(options: dict[str, Any], topology: Topology | None) -> None:
    """False alarms: see ``check_drafter``, below 1e-6."""
    target = target_of(6, dtype=torch.float64)
    drafter = BlockDrafter(tiny_block_head(target, 5, **options), target, topology=topology)
    check_drafter(
        drafter,
        6,
        target=with_states(target, drafter),
        distribution=lambda rows: warp(rows, 6),
    )


STOPS = [None, Confidence(0.5), Survival(0.6)]


def stopping_head(size: int = 3) -> Any:
    """A DSpark head for ``TOY`` whose confidence is sigmoid(±1): unsure after token 0."""
    head = tiny_block_head(TOY, size, block_size=2, **DSPARK)
    network = head.network
    with torch.no_grad():
        network.markov_head.markov_w1.weight[:, 0] = torch.tensor([-1.0, 1.0, 1.0])
        network.confidence_head.proj.weight.zero_()
        network.confidence_head.proj.weight[0, -head.config.markov_rank] = 1.0
        network.confidence_head.proj.bias.zero_()
    return head


@torch.inference_mode()
@pytest.mark.parametrize("stop", STOPS, ids=str)
@pytest.mark.parametrize("size", [3, 2])
def test_a_round_has_exactly_the_targets_distribution(stop: Any, size: int) -> None:
    """ENUM of chains of a DSpark head: with a stop, the length depends on the drafted tokens."""
    drafter = BlockDrafter(stopping_head(size), TOY, stop)
    target, prompt = with_states(TOY, drafter), (0, 2, 1)
    found = enumerate_round(
        target, drafter, Rejection(), 2, prompt=prompt, distribution=lambda n: warp(n, 3)
    )
    assert found.total_variation < 1e-9


@torch.inference_mode()
def test_the_stop_acts_and_depends_on_the_drafted_token() -> None:
    """Otherwise the test above would prove nothing."""
    drafter = BlockDrafter(stopping_head(), TOY, Confidence(0.5))
    target, prompts = with_states(TOY, drafter), [[0, 2, 1]] * 64
    _, context, _, state = started(drafter, target, prompts, warp(64, 3))
    draft = drafter.propose(state, context, Budget(2), context.rng)
    after = list(zip(draft.tokens_BN[:, 1].tolist(), draft.num_drafted_B.tolist(), strict=True))
    assert set(after) == {(0, 1), (1, 2), (2, 2)}, "only token 0 ends the draft"


class DropsUnsure(BlockDrafter):
    """MUT: drops a token by the confidence of what follows it, which depends on the token."""

    def propose(self, *args: Any) -> Draft:
        draft = super().propose(*args)
        ends_B1 = draft.num_drafted_B[:, None]
        short_B1 = (ends_B1 < 2) & (ends_B1 > 0)
        node_N = torch.arange(draft.num_nodes)
        return replace(draft, mask_BN=draft.mask_BN & ~(short_B1 & (node_N == ends_B1)))


@torch.inference_mode()
def test_dropping_a_drawn_token_would_show() -> None:
    drafter = DropsUnsure(stopping_head(), TOY, Confidence(0.5))
    found = enumerate_round(
        with_states(TOY, drafter),
        drafter,
        Rejection(),
        2,
        prompt=(0, 2, 1),
        distribution=lambda n: warp(n, 3),
    )
    assert found.total_variation > 1e-3


@torch.inference_mode()
@pytest.mark.parametrize("options", [{}, DSPARK], ids=["dflash", "dspark"])
def test_a_round_of_trees_has_exactly_the_targets_distribution(options: dict[str, Any]) -> None:
    """ENUM of trees of draws without replacement."""
    drafter = BlockDrafter(
        tiny_block_head(TOY, block_size=3, **options),
        TOY,
        topology=Topology.rank_paths([[0], [1], [0, 0]]),
    )
    found = enumerate_round(
        with_states(TOY, drafter),
        drafter,
        Distinct(),
        2,
        prompt=(0, 2, 1),
        distribution=lambda n: warp(n, 3),
    )
    assert found.total_variation < 1e-9


@torch.inference_mode()
def test_many_rounds_have_the_targets_distribution() -> None:
    """CHI2 over three tokens of 4,000 rows. A correct drafter fails with probability 1e-4 (seed
    fixed)."""
    drafter = BlockDrafter(stopping_head(), TOY, Survival(0.6))
    p = chi2(
        with_states(TOY, drafter),
        drafter,
        Rejection(),
        2,
        length=3,
        num_rows=4000,
        distribution=lambda n: warp(n, 3),
    )
    assert p > 1e-4


class RootInContext(BlockDrafter):
    """MUT: takes the hidden state of the last accepted token for that of the next root, as if the
    target had run over it."""

    def commit(self, state: Any, draft: Any, verdict: Any, scores: Any) -> None:
        super().commit(state, draft, verdict, scores)
        cache, newest = state.cache, state.cache.newest
        self.model.catch_up(cache)
        self.model.read(cache, at_last(newest.hidden_BKF, newest.num.device_B))
        cache.append(1)
        cache.base = cache.base + 1

    def propose(self, *arguments: Any) -> Draft:
        with patch.object(block, "_complete", lambda *_: None):
            return super().propose(*arguments)


class OneLate(BlockDrafter):
    """MUT: hands each position the hidden state of the one before it."""

    def commit(self, state: Any, draft: Any, verdict: Any, scores: Scores) -> None:
        assert scores.hidden_BNH is not None
        late = Scores(scores.logits_BNV, scores.hidden_BNH.roll(1, 1))
        super().commit(state, draft, verdict, late)


class MaskSlotOff(BlockDrafter):
    """MUT: puts the root into the second slot."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        config = self.model.network.config
        self.model.network.config = replace(
            config, sample_from_anchor=not config.sample_from_anchor
        )


class KeepsNoise(BlockDrafter):
    """MUT: the block's keys and values of accepted tokens stay in the cache."""

    def commit(self, state: Any, draft: Any, verdict: Any, scores: Any) -> None:
        state.cache.append(verdict.num_emitted)
        state.cache.base = state.cache.base + verdict.num_emitted


@torch.inference_mode()
@pytest.mark.parametrize("wrong", [RootInContext, OneLate, MaskSlotOff, KeepsNoise])
@pytest.mark.parametrize("options", [{}, DSPARK], ids=["dflash", "dspark"])
def test_a_wrong_alignment_would_be_found(wrong: type, options: dict[str, Any]) -> None:
    head = tiny_block_head(TARGET, **options)
    off = []
    for q_BNV, draft in rounds(wrong(head, TARGET), head, ragged_prompts([9, 9], V), 3):
        D = min(3, draft.num_nodes - 1)
        assert draft.probs_BNV is not None
        off.append(float((draft.probs_BNV[:, :D] - q_BNV[:, :D]).abs().max()))
    assert max(off) > 1e-2


@torch.inference_mode()
def test_a_stop_is_in_front_of_the_unsure_slot() -> None:
    """Each row has the tokens up to the first slot whose confidence, given the tokens before, is
    below the threshold."""
    head = tiny_block_head(TARGET, **DSPARK)
    threshold = 0.6
    drafter = BlockDrafter(head, TARGET, Confidence(threshold))
    prompts = ragged_prompts([5] * 24, V)
    _, context, _, state = started(drafter, TARGET, prompts, warp(24))
    draft = drafter.propose(state, context, Budget(4), context.rng)
    lengths = draft.num_drafted_B.tolist()
    for b, length in enumerate(lengths):
        tokens = context.tokens_BT[b, : context.lengths[b]].tolist()
        h_NH = reference_block(head, TARGET, tokens)
        before = draft.tokens_BN[b, : length + 1]
        a_N = head.network.confidence_logits(h_NH[: length + 1], before[: len(h_NH)]).sigmoid()
        assert bool((a_N[:length] >= threshold).all())
        assert length == 4 or a_N[length] < threshold
    assert len(set(lengths)) > 2


def test_heads_of_other_targets_are_refused() -> None:
    head = tiny_block_head(TARGET)
    for other, message in [
        (target_of(29), "23 tokens.*29"),
        (target_of(hidden_size=16), "width 32.*16"),
    ]:
        with pytest.raises(IncompatibleError, match=message):
            BlockDrafter(head, other)
    with pytest.raises(IncompatibleError, match="no confidence"):
        BlockDrafter(head, TARGET, Confidence(0.5))


@torch.inference_mode()
def test_rows_without_hidden_states_draft_nothing() -> None:
    """A state that was started in the middle of a sequence, beside one that read its prompt."""
    drafter = BlockDrafter(tiny_block_head(TARGET), TARGET)
    prompts = ragged_prompts([4, 6], V)
    _, context, _, state = started(drafter, TARGET, prompts[:1], warp(1))
    late = Context.start(prompts[1:], warp(1), [0], [1])
    unread = drafter.start(late)
    context.join(late)
    context.distribution = warp(2)
    drafter.join(state, unread)
    draft = drafter.propose(state, context, Budget(3), context.rng)
    assert draft.num_drafted_B.tolist() == [3, 0]

"""EAGLE-3 heads: what they draft from equals the head computed anew over the true features.

Legend: B rows, N nodes, V vocabulary.
"""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from tiny_heads import reference_logits, started, target_of, tiny_head
from tiny_models import ragged_prompts
from tiny_seq2seq import tiny_seq2seq
from torch import Tensor

from outrider import Sampling
from outrider.core import Budget, Draft, commit_round, run_round
from outrider.core.errors import IncompatibleError
from outrider.drafters.heads.eagle3 import (
    Eagle3Drafter,
    Eagle3DynamicTreeDrafter,
    Eagle3Model,
    Eagle3TreeDrafter,
    OnHiddenStates,
)
from outrider.drafters.heads.newest import MOST_WAITING
from outrider.drafters.tree.topology import Topology
from outrider.sampling import Warp
from outrider.verifiers import Rejection

γ = 3
TARGET = target_of(dtype=torch.float64)
V = TARGET.num_tokens
OPTIONS = [
    {},
    {"norm_before_residual": True},
    {"norm_before_fc": True, "norm_output": True},
    {"fc_norm": True},
    {"layers": 2},
    {"layers": 2, "family": "qwen3"},
]


def warp(rows: int, temperature: float = 0.9) -> Warp:
    return Warp([Sampling(temperature=temperature)] * rows, V)


def expected(head: Any, context: Any, draft: Draft) -> Tensor:
    """q of every node with children, (B, N, V), from the head computed anew."""
    rows = []
    for b, length in enumerate(context.lengths):
        tokens = context.tokens_BT[b, :length].tolist()
        nodes = []
        for i in range(draft.num_nodes):
            path = draft.ancestors_BNN[b, i, 1:].nonzero()[:, 0] + 1
            drafted = draft.tokens_BN[b, path].tolist()
            nodes.append(reference_logits(head, TARGET, tokens, drafted)[-1])
        rows.append(torch.stack(nodes))
    return (torch.stack(rows) / 0.9).softmax(-1)


def rounds(
    drafter: Any,
    prompts: Sequence[Sequence[int]],
    num: int,
    width: int = 512,
    lengths: Sequence[int] = (γ,),
) -> list[tuple[Any, Draft]]:
    """The q that some rounds should have drafted from, and their drafts, of these lengths in
    turn."""
    target, context, cache, state = started(drafter, TARGET, prompts, warp(len(prompts)), width)
    found = []
    for number in range(num):
        parts = context, target, cache, drafter, state
        round_ = run_round(*parts, Rejection(), Budget(lengths[number % len(lengths)]))
        found.append((expected(drafter.model.head, context, round_.proposed), round_.proposed))
        commit_round(*parts, round_, round_.verdict.num_accepted_B.tolist())
    return found


@torch.inference_mode()
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_drafts_from_the_head_over_the_true_features(options: dict[str, Any]) -> None:
    """Ragged rows, prompts read in passes of three tokens, four rounds: q of every drafted token
    is the head's over the target's hidden states of all committed tokens, up to the float32 in
    which norms and angles are computed."""
    head = tiny_head(TARGET, 17, **options)
    drafter = Eagle3Drafter(Eagle3Model(head, TARGET), V)
    for q_BNV, draft in rounds(drafter, ragged_prompts([9, 3, 6], V), 4, width=3):
        assert draft.num_nodes == γ + 1
        assert draft.probs_BNV is not None
        assert (draft.probs_BNV[..., : V - 17] == 0).all()
        torch.testing.assert_close(draft.probs_BNV[:, :γ], q_BNV[:, :γ], rtol=1e-5, atol=1e-6)


@torch.inference_mode()
@pytest.mark.parametrize("num_without", [1, 3, MOST_WAITING + 2])
def test_tokens_of_rounds_without_drafts_are_read_when_the_head_drafts_again(
    num_without: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Once for all of them, but for those beyond ``MOST_WAITING``."""
    drafter = Eagle3Drafter(Eagle3Model(tiny_head(TARGET, 17), TARGET), V)
    read, passes = drafter.model.read, []

    def counted(cache: Any, tokens_BN: Tensor, hidden_BNF: Tensor) -> Tensor:
        passes.append(tokens_BN.shape[1])
        return read(cache, tokens_BN, hidden_BNF)

    monkeypatch.setattr(drafter.model, "read", counted)
    lengths = [γ, *[0] * num_without]
    made = rounds(drafter, ragged_prompts([9, 3, 6], V), 2 * len(lengths), lengths=lengths)
    assert [draft.num_nodes for _, draft in made] == [1 + length for length in lengths] * 2
    for q_BNV, draft in (made[0], made[len(lengths)]):
        assert draft.probs_BNV is not None
        torch.testing.assert_close(draft.probs_BNV[:, :γ], q_BNV[:, :γ], rtol=1e-5, atol=1e-6)
    later = len(passes) - 2  # but for the prompts and the first round
    assert later == (1 if num_without < MOST_WAITING else 3)


@torch.inference_mode()
def test_a_tree_drafts_from_the_head_over_the_true_features() -> None:
    """Every node of a static tree; its paths are accepted and packed in between."""
    head = tiny_head(TARGET, 17)
    topology = Topology.expansion([2, 2, 1])
    drafter = Eagle3TreeDrafter(Eagle3Model(head, TARGET), V, topology, "iid")
    inner = [i for i in range(topology.num_nodes) if topology.num_children[i]]
    for q_BNV, draft in rounds(drafter, ragged_prompts([9, 3, 6], V), 4):
        assert draft.probs_BNV is not None
        found, wanted = draft.probs_BNV[:, inner], q_BNV[:, inner]
        torch.testing.assert_close(found, wanted, rtol=1e-5, atol=1e-6)


@torch.inference_mode()
def test_a_dynamic_tree_keeps_the_most_probable_paths() -> None:
    """Every drafted node is among its parent's most probable tokens under the head computed anew,
    and no token that was left out at the first level is more probable than one that was kept."""
    head, width = tiny_head(TARGET, 17), 3
    drafter = Eagle3DynamicTreeDrafter(Eagle3Model(head, TARGET), V, 12, width, 3)
    _, context, _, state = started(drafter, TARGET, ragged_prompts([9, 3], V), warp(2))
    draft = drafter.propose(state, context, Budget(3), context.rng)
    q_BNV = expected(head, context, draft)
    for b in range(2):
        for i in range(1, draft.num_nodes):
            parent, token = int(draft.parents_BN[b, i]), int(draft.tokens_BN[b, i])
            assert token in q_BNV[b, parent].topk(width).indices.tolist()


class OneLate(OnHiddenStates):
    """MUT: hands each token the hidden state two tokens before it."""

    def read_prompt(self, state: Any, context: Any, hidden_BNH: Tensor, first: int) -> None:
        super().read_prompt(state, context, hidden_BNH.roll(1, 1), first)


class OwnToken(OnHiddenStates):
    """MUT: hands each token the hidden state of the token itself, in rounds."""

    def commit(self, state: Any, draft: Any, verdict: Any, scores: Any) -> None:
        hidden_BNH = scores.hidden_BNH.roll(-1, 1)
        super().commit(state, draft, verdict, type(scores)(scores.logits_BNV, hidden_BNH))


class RootsFeature(OnHiddenStates):
    """MUT: drafts every token with the feature of the root."""

    def propose(self, state: Any, *rest: Any) -> Draft:
        cache = state.features
        cache.parents = lambda nodes: cache.last_BH[:, None]
        return super().propose(state, *rest)


@torch.inference_mode()
@pytest.mark.parametrize("wrong", [OneLate, OwnToken, RootsFeature])
def test_a_shifted_feature_would_be_found(wrong: type) -> None:
    drafter = type("Wrong", (wrong, Eagle3Drafter), {})(Eagle3Model(tiny_head(TARGET), TARGET), V)
    off = [
        (draft.probs_BNV[:, :γ] - q_BNV[:, :γ]).abs().max()
        for q_BNV, draft in rounds(drafter, ragged_prompts([9, 9], V), 3)
    ]
    assert max(off) > 1e-2


def test_an_encoder_decoder_is_refused() -> None:
    head = tiny_head(TARGET)
    with pytest.raises(IncompatibleError, match=r"tiny head .* is an encoder-decoder"):
        Eagle3Model(head, tiny_seq2seq())


def test_positions_stay_exact_in_a_head_of_lower_precision() -> None:
    """Cast to bfloat16, the frequencies of the rotary embedding would turn keys at position 1000 by
    other angles than those that the head was trained with."""
    network = tiny_head(TARGET).network
    position_11 = torch.tensor([[1000]])
    wanted = network._rotary(position_11, torch.float32)
    found = network.to(torch.bfloat16)._rotary(position_11, torch.float32)
    assert torch.equal(found.cos_BNC, wanted.cos_BNC)
    assert torch.equal(found.sin_BNC, wanted.sin_BNC)

"""Packed samples do not see each other, and each is seen once an epoch."""

from collections import Counter

import pytest
import torch
from tiny_models import FAMILIES, VOCAB, ragged_prompts, tiny_module

from outrider.train.distill.cells import top_cells
from outrider.train.distill.objective import from_cells, from_labels, from_target
from outrider.train.distill.packing import Packing, assign, batch_of, logits_of, pack, packs
from outrider.train.distill.sample import Sample, cut
from outrider.train.losses import forward_kl

LENGTHS = (13, 2, 7, 21)
FIRSTS = (4, 1, 6, 9)


def samples():
    prompts = ragged_prompts(LENGTHS)
    return [Sample(tuple(tokens), first) for tokens, first in zip(prompts, FIRSTS, strict=True)]


def test_a_row_lists_what_is_trained_on():
    row = pack([Sample((5, 6, 7, 8), 2), Sample((9, 3), 1)])
    assert row.tokens_T.tolist() == [5, 6, 7, 9]
    assert row.positions_T.tolist() == [0, 1, 2, 0]
    assert row.predicts_N.tolist() == [1, 2, 3]
    assert row.labels_N.tolist() == [7, 8, 3]
    assert row.batch_positions == 3


@pytest.mark.parametrize("family", [family for family in FAMILIES if family != "opt"])
def test_packed_logits_are_those_of_separate_samples(family):
    model = tiny_module(family)
    alone_NV = torch.cat([logits_of(model, pack([each])) for each in samples()])
    packed_NV = logits_of(model, pack(samples()))
    torch.testing.assert_close(packed_NV, alone_NV, atol=1e-4, rtol=1e-4)
    assert packs(model)


def test_a_position_is_trained_on_the_token_that_follows_it():
    """An off-by-one in the packing would change these logits."""
    model, (sample, *_) = tiny_module(), samples()
    every_TV = model(torch.tensor([sample.tokens])).logits[0]
    expected_NV = every_TV[sample.first - 1 : -1]
    torch.testing.assert_close(logits_of(model, pack([sample])), expected_NV)


def test_a_model_whose_samples_see_each_other_is_found_out():
    assert not packs(tiny_module("opt"))  # makes itself an attention mask of ones


@pytest.mark.parametrize("kind", ["cells", "target", "labels"])
def test_packed_loss_is_the_mean_over_separate_losses(kind):
    """In one row, in several, and one sample at a time, with the same gradient."""
    target, draft = tiny_module(seed=1).requires_grad_(False), tiny_module(seed=2)
    given = samples()
    if kind == "cells":
        scored = [top_cells(logits_of(target, pack([each])), 9) for each in given]
        given = [Sample(s.tokens, s.first, c) for s, c in zip(given, scored, strict=True)]
    objective = {
        "cells": from_cells(draft, forward_kl, 1.0, VOCAB),
        "target": from_target(draft, target, forward_kl, 1.0, VOCAB),
        "labels": from_labels(draft),
    }[kind]

    def loss_and_gradient(rows):
        draft.zero_grad()
        loss = sum(objective(row) for row in batch_of(rows))
        loss.backward()
        return loss.detach(), draft.model.layers[0].mlp.up_proj.weight.grad.clone()

    loss, gradient = loss_and_gradient([given])
    positions = torch.tensor([each.num_positions for each in given])
    alone = torch.stack([loss_and_gradient([[each]])[0] for each in given])
    torch.testing.assert_close(loss, (alone * positions).sum() / positions.sum())
    for rows in ([given[:1], given[1:]], [[each] for each in given]):
        other_loss, other_gradient = loss_and_gradient(rows)
        torch.testing.assert_close(other_loss, loss)
        torch.testing.assert_close(other_gradient, gradient, atol=1e-5, rtol=1e-4)


def test_the_target_keeps_its_precision_where_the_draft_computes_in_bfloat16():
    """So that both ways to its probabilities, cached or in every step, agree."""
    dtypes = []

    def divergence(p_logits_NV, q_logits_NV, temperature=1.0):
        dtypes.append((p_logits_NV.dtype, q_logits_NV.dtype))
        return forward_kl(p_logits_NV, q_logits_NV, temperature)

    objective = from_target(tiny_module(seed=2), tiny_module(seed=1), divergence, 1.0, VOCAB)
    with torch.autocast("cpu", torch.bfloat16):
        objective(pack(samples()))
    assert dtypes == [(torch.float32, torch.bfloat16)]


def test_samples_go_into_the_first_row_with_room():
    assert assign([6, 5, 3, 4, 2], range(5), 10) == [[0, 2], [1, 3], [4]]
    assert assign([6, 5, 4, 2], [3, 2, 1, 0], 10) == [[3, 2], [1], [0]]


def test_each_sample_is_seen_once_an_epoch():
    sizes = torch.randint(1, 40, (200,), generator=torch.Generator().manual_seed(0)).tolist()
    packing = Packing(sizes, 64, seed=3)
    seen, number = [], 0
    while len(seen) < 2 * len(sizes):
        row = packing[number]
        assert sum(sizes[index] for index in row) <= 64
        seen += row
        number += 1
    assert set(Counter(seen[: len(sizes)]).values()) == {1}
    assert set(Counter(seen).values()) == {2}
    assert seen[: len(sizes)] != seen[len(sizes) :]
    assert sum(sizes) / 64 > 0.9 * number / 2  # rows are nearly full


def test_rows_depend_on_their_number_alone():
    sizes = [3, 9, 4, 8, 2, 7] * 5
    one, other = Packing(sizes, 16, seed=1), Packing(sizes, 16, seed=1)
    assert other[30] == [one[number] for number in range(31)][30]
    assert [Packing(sizes, 16, seed=2)[n] for n in range(9)] != [one[n] for n in range(9)]
    assert all(len(Packing(sizes, 0, seed=1)[number]) == 1 for number in range(9))


def test_samples_are_cut_to_what_a_model_reads():
    assert cut((1, 2, 3, 4, 5), 2, 3) == Sample((1, 2, 3, 4), 2)
    assert cut((1, 2, 3, 4, 5), 4, 3) is None
    assert cut((1,), 1, 8) is None

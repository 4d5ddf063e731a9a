"""Training Medusa heads: head i at t is trained on the token at t + 1 + i.

Legend: B rows, T tokens, D draft vocabulary, V vocabulary.
"""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_heads import hidden_states, target_of, tiny_medusa
from tiny_models import full_logits, ragged_prompts
from torch import Tensor

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.formats.medusa import load_medusa, save_medusa
from outrider.drafters.heads.medusa import MedusaHead
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.kind import Ground
from outrider.train.heads.kinds import find_kind
from outrider.train.heads.medusa import MedusaTraining
from outrider.train.heads.states import StateSample

TARGET = target_of()
V = TARGET.num_tokens


def batch_of(rows: list[list[int]], first_answer: int = 0) -> StateBatch:
    """Rows whose tokens from ``first_answer`` on the target wrote."""
    samples = []
    for tokens in rows:
        final_TH = hidden_states(TARGET, tokens, [TARGET.num_layers])
        samples.append(
            StateSample(
                torch.tensor(tokens),
                torch.arange(len(tokens)) >= first_answer,
                final_TH,
                final_TH,
                full_logits(TARGET.module, tokens).logsumexp(-1),
            )
        )
    return StateBatch.of(samples)


def training_of(head: MedusaHead, **options: Any) -> MedusaTraining:
    return MedusaTraining(head.network, head.vocabulary, TARGET, **options)


@torch.no_grad()
@pytest.mark.parametrize("labels", ["tokens", "target"])
def test_the_loss_is_that_of_every_head_at_its_own_token(labels: Any) -> None:
    """Against a loop over positions and heads, with p from the target's logits over all tokens."""
    head, rows, first, decay = tiny_medusa(TARGET, 17), ragged_prompts([12, 9], V), 4, 0.7
    ids = head.vocabulary.target_ids_D.tolist()
    total = 0.0
    for i in range(1, head.config.num_heads + 1):
        losses, weights = [], []
        for tokens in rows:
            p_TV = full_logits(TARGET.module, tokens).softmax(-1)
            hidden_TH = hidden_states(TARGET, tokens, [TARGET.num_layers])
            for t in range(len(tokens) - 1 - i):
                label = tokens[t + 1 + i]
                if t + 1 + i < first or (labels == "tokens" and label not in ids):
                    continue
                q_D = head.network(hidden_TH[t], i - 1).softmax(-1)
                if labels == "tokens":
                    losses.append(-math.log(q_D[ids.index(label)]))
                    weights.append(1.0)
                else:
                    p_D = p_TV[t + i, ids]
                    mass = float(p_D.sum())
                    losses.append(float((p_D / mass * (p_D / mass / q_D).log()).sum()))
                    weights.append(mass)
        mean = sum(w * x for w, x in zip(weights, losses, strict=True)) / sum(weights)
        total += decay**i * mean
    found = training_of(head, decay=decay, labels=labels).loss(batch_of(rows, first))
    assert abs(float(found) - total) < 1e-4


def test_padding_changes_nothing() -> None:
    head, rows = tiny_medusa(TARGET, 17), ragged_prompts([7, 12], V)
    alone, both = batch_of(rows[:1]), batch_of(rows)
    both.answers_BT[1] = False
    gradients = []
    for batch in (alone, both):
        head.network.zero_grad()
        training_of(head).loss(batch).backward()
        gradients.append([parameter.grad.clone() for parameter in head.network.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class LateTeacher(MedusaTraining):
    """MUT: the teacher of the position after."""

    def loss(self, batch: StateBatch) -> Tensor:
        rolled = {"tokens_BT": batch.tokens_BT.roll(1, 1)}
        return super().loss(StateBatch(**{**vars(batch), **rolled}))


class HeadOff(MedusaTraining):
    """MUT: trains head i as if it predicted the token that the target's own head predicts."""

    def _loss_of(self, batch: StateBatch, i: int) -> Tensor:
        shifted = {"final_BTH": batch.final_BTH.roll(-1, 1)}
        return super()._loss_of(StateBatch(**{**vars(batch), **shifted}), i)


@torch.no_grad()
@pytest.mark.parametrize("wrong", [LateTeacher, HeadOff])
def test_a_shift_by_one_would_be_found(wrong: type[MedusaTraining]) -> None:
    head, batch = tiny_medusa(TARGET, 17), batch_of(ragged_prompts([12, 9], V))
    parts = head.network, head.vocabulary, TARGET, 0.8, "tokens"
    right, found = (kind(*parts).loss(batch) for kind in (MedusaTraining, wrong))
    assert abs(float(found - right)) > 1e-3


@pytest.mark.parametrize("size", [0, 17])
def test_heads_begin_as_the_targets_own_head_and_learn(size: int, tmp_path: Path) -> None:
    """Built as the trainer builds them; saved and read again."""
    row = find_kind("medusa")
    values = row.values({"draft_vocab_size": size, "num_heads": 2})
    training = row.build(Ground(TARGET, torch.arange(V), 0), **values)
    batch = batch_of(ragged_prompts([16] * 4, V))
    head = training.head()
    with torch.no_grad():
        logits_BTV = TARGET.module.get_output_embeddings()(batch.final_BTH)
        for number in range(2):
            torch.testing.assert_close(
                head.network(batch.final_BTH, number),
                logits_BTV[..., head.vocabulary.target_ids_D],
            )
    optimizer = torch.optim.AdamW(training.module.parameters(), lr=1e-2)
    losses = []
    for _ in range(20):
        optimizer.zero_grad()
        loss = training.loss(batch)
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.9 * losses[0]
    training.save(tmp_path)
    again = load_medusa(tmp_path, TARGET)
    assert again.vocabulary.is_full == (size == 0)
    assert again.config == head.config


def test_wrong_options_are_named() -> None:
    row = find_kind("medusa")
    for options, message in [
        ({"decay": 0.0}, "decay=0"),
        ({"num_heads": 0}, "num_heads=0"),
        ({"num_layers": -1}, "num_layers=-1"),
    ]:
        with pytest.raises(InvalidParameterError, match=message):
            row.build(Ground(TARGET, torch.arange(V), 0), **row.values(options))


def test_heads_are_trained_on_from_their_folder(tmp_path: Path) -> None:
    """With their own shape, whatever the options say."""
    head = tiny_medusa(TARGET, 17)
    save_medusa(head, tmp_path, dtype=torch.float32)
    row = find_kind("medusa")
    values = row.values({"start": str(tmp_path), "num_heads": 1})
    training = row.build(Ground(TARGET, torch.arange(V), 0), **values)
    for name, parameter in head.network.named_parameters():
        assert torch.equal(training.network.get_parameter(name), parameter)

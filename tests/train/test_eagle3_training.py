"""Training EAGLE-3 heads: step i of the training-time test is draft step i + 1.

Legend: B rows, T tokens, S slots, D draft vocabulary.
"""

from typing import Any

import pytest
import torch
from tiny_heads import hidden_states, reference_logits, target_of, tiny_head
from tiny_models import full_logits, ragged_prompts
from torch import Tensor

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.eagle3 import Eagle3Head
from outrider.runtime import HFModel
from outrider.runtime.kernels.build import find_compiler
from outrider.train.heads import eagle3
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.eagle3 import Eagle3Training
from outrider.train.heads.kind import Ground
from outrider.train.heads.states import StateSample
from outrider.train.losses import forward_kl

TARGET = target_of()
V = TARGET.num_tokens


def batch_of(head: Eagle3Head, rows: list[list[int]], first_answer: int = 0) -> StateBatch:
    """Rows whose tokens from ``first_answer`` on the target wrote."""
    samples = []
    for tokens in rows:
        both_TF = hidden_states(TARGET, tokens, (*head.target_layers, TARGET.num_layers))
        F = head.config.fused_size
        samples.append(
            StateSample(
                torch.tensor(tokens),
                torch.arange(len(tokens)) >= first_answer,
                both_TF[:, :F],
                both_TF[:, F:],
                full_logits(TARGET.module, tokens).logsumexp(-1),
            )
        )
    return StateBatch.of(samples)


def training_of(head: Eagle3Head, target: HFModel = TARGET, **options: Any) -> Eagle3Training:
    return Eagle3Training(head.network, head.vocabulary, target, **options)


@torch.no_grad()
@pytest.mark.parametrize("options", [{}, {"norm_output": True}, {"layers": 2}], ids=str)
def test_each_step_computes_what_the_drafter_computes(options: dict[str, Any]) -> None:
    head = tiny_head(TARGET, 17, **options)
    rows = ragged_prompts([10, 7], V)
    steps = list(training_of(head, ttt_length=4).steps(batch_of(head, rows)))
    for b, tokens in enumerate(rows):
        for i, output_BSH in enumerate(steps):
            for t in range(len(tokens) - 2 - i):
                found_D = head.network.logits(output_BSH[b, t])
                drafted = tokens[t + 2 : t + 2 + i]
                wanted_V = reference_logits(head, TARGET, tokens[: t + 2], drafted)[-1]
                torch.testing.assert_close(
                    found_D, wanted_V[head.vocabulary.target_ids_D], rtol=1e-4, atol=1e-4
                )


@torch.no_grad()
def test_the_loss_is_the_divergence_at_the_tokens_that_the_target_wrote() -> None:
    """Against a loop over positions, with p from the target's own logits over all tokens."""
    head, decay, length = tiny_head(TARGET, 17), 0.7, 3
    rows, first = ragged_prompts([10, 7], V), 4
    ids_D = head.vocabulary.target_ids_D
    total = torch.zeros(())
    for i in range(length):
        losses, weights = [], []
        for tokens in rows:
            p_TV = full_logits(TARGET.module, tokens).softmax(-1)
            for label in range(max(first, 2 + i), len(tokens)):
                start = label - 2 - i  # the slot whose chain predicts the label at step i
                q_V = reference_logits(
                    head, TARGET, tokens[: start + 2], tokens[start + 2 : label]
                )[-1]
                p_D = p_TV[label - 1, ids_D]
                losses.append(forward_kl(p_D.log()[None], q_V[ids_D][None])[0])
                weights.append(p_D.sum())
        weight_N = torch.stack(weights)
        total += decay**i * (torch.stack(losses) * weight_N).sum() / weight_N.sum()
    found = training_of(head, ttt_length=length, decay=decay).loss(batch_of(head, rows, first))
    torch.testing.assert_close(found, total, rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing() -> None:
    """A row alone has the gradient that it has beside a longer one, which counts no position."""
    head = tiny_head(TARGET, 17)
    rows = ragged_prompts([6, 11], V)
    alone, both = batch_of(head, rows[:1]), batch_of(head, rows)
    both.answers_BT[1] = False
    gradients = []
    for batch in (alone, both):
        head.network.zero_grad()
        training_of(head).loss(batch).backward()
        gradients.append([parameter.grad.clone() for parameter in head.network.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


class LateTeacher(Eagle3Training):
    """MUT: the teacher of the position after."""

    def loss(self, batch: StateBatch) -> Tensor:
        rolled = {
            "final_BTH": batch.final_BTH.roll(1, 1),
            "log_norm_BT": batch.log_norm_BT.roll(1, 1),
        }
        return super().loss(StateBatch(**{**vars(batch), **rolled}))


class OwnToken(Eagle3Training):
    """MUT: a feature is read with the token at its own position."""

    def steps(self, batch: StateBatch) -> Any:
        tokens_BT = batch.tokens_BT.roll(1, 1)
        return super().steps(StateBatch(**{**vars(batch), "tokens_BT": tokens_BT}))


@torch.no_grad()
@pytest.mark.parametrize("wrong", [LateTeacher, OwnToken])
def test_a_shift_by_one_would_be_found(wrong: type[Eagle3Training]) -> None:
    head = tiny_head(TARGET, 17)
    batch = batch_of(head, ragged_prompts([10, 7], V))
    right = training_of(head).loss(batch)
    found = wrong(head.network, head.vocabulary, TARGET).loss(batch)
    assert abs(float(found - right)) > 1e-2


def test_training_brings_the_head_to_the_target() -> None:
    """The same batch again and again: α at the first draft position rises by half."""
    head = tiny_head(TARGET, 17)
    batch = batch_of(head, ragged_prompts([24, 24], V))
    training = training_of(head, ttt_length=2)
    optimizer = torch.optim.Adam(head.network.parameters(), lr=1e-2)

    def alpha() -> float:
        with torch.no_grad():
            output_BSH = next(iter(training.steps(batch)))[:, :-1]
            q_BSD = head.network.logits(output_BSH).softmax(-1)
            z_BTD = training.teacher.logits(batch.final_BTH)
            p_BSD = (z_BTD - batch.log_norm_BT[..., None]).exp()[:, 1:-1]
            return float(torch.minimum(p_BSD, q_BSD).sum(-1).mean())

    before = alpha()
    for _ in range(60):
        optimizer.zero_grad()
        training.loss(batch).backward()
        optimizer.step()
    assert alpha() > before + 0.25


@pytest.mark.skipif(find_compiler() is None, reason="there is no C++ compiler")
def test_a_compiled_divergence_has_the_same_gradients() -> None:
    head = tiny_head(TARGET, 17)
    batch = batch_of(head, ragged_prompts([10, 7], V))
    gradients = []
    for compile in (False, True):
        head.network.zero_grad()
        training_of(head, ttt_length=2, compile=compile).loss(batch).backward()
        gradients.append([parameter.grad.clone() for parameter in head.network.parameters()])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_a_compiled_divergence_without_a_compiler_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(eagle3, "find_compiler", lambda: None)
    ground = Ground(TARGET, torch.ones(V), seed=0)
    with pytest.raises(InvalidParameterError, match=r"compile=true: there is no C\+\+ compiler"):
        eagle3.EAGLE3.build(ground, compile=True)

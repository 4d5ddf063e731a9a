"""The loss of P-EAGLE heads against its definition, and the masks that are trained.

Legend: T tokens, D draft vocabulary.
"""

import torch
from tiny_heads import hidden_states, peagle_head, target_of
from torch import Tensor

from outrider.drafters.heads.peagle import PEagleHead
from outrider.runtime import HFModel
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.peagle import PEagleTraining, Retention
from outrider.train.heads.states import StateSample

TARGET = target_of()
TEXTS = ([3, 1, 4, 1, 5, 9, 2, 6, 5, 3], [8, 9, 7, 9, 3, 2, 3])
ANSWERS = ((3, 10), (2, 5))
"""The tokens of each text that the target wrote: from, to."""


@torch.no_grad()
def sample(
    text: list[int], answer: tuple[int, int], head: PEagleHead, target: HFModel
) -> StateSample:
    """A text with the target's hidden states."""
    output = target.module(input_ids=torch.tensor([text]), output_hidden_states=True)
    answers_T = torch.zeros(len(text), dtype=torch.bool)
    answers_T[slice(*answer)] = True
    return StateSample(
        torch.tensor(text),
        answers_T,
        hidden_states(target, text, head.target_layers),
        output.hidden_states[-1][0],
        output.logits[0].logsumexp(-1),
    )


def made(
    retention: Retention, num: int = 3, vocabulary: int = 17
) -> tuple[PEagleTraining, StateBatch]:
    head = peagle_head(TARGET, vocabulary, num)
    samples = [sample(*each, head, TARGET) for each in zip(TEXTS, ANSWERS, strict=True)]
    training = PEagleTraining(head.network, head.vocabulary, TARGET, retention=retention)
    return training, StateBatch.of(samples)


@torch.no_grad()
def divergences(
    training: PEagleTraining, row: int, slots: list[int]
) -> list[tuple[Tensor, Tensor]]:
    """By depth behind each slot, KL(p‖q) over the draft vocabulary and p's mass there, where the
    target wrote the token: the head run anew over the text up to the slot, and then the masks."""
    text, answer = TEXTS[row], ANSWERS[row]
    network, ids_D = training.network, training.vocabulary.target_ids_D
    p_TV = TARGET.module(torch.tensor([text])).logits[0].softmax(-1)
    one = StateBatch.of([sample(text, answer, training.head(), TARGET)])
    found = []
    for slot in slots:
        G = network.config.num_slots
        masks = training.masks(one, 0)._replace(
            anchor_BM=torch.full((1, G - 1), slot),
            depth_M=torch.arange(1, G),
            exists_BM=torch.ones(1, G - 1, dtype=torch.bool),
        )
        output_NH = training.outputs(one, masks)[0]
        own_GH = torch.cat([output_NH[slot : slot + 1], output_NH[len(text) - 1 :]])
        log_q_GD = network.logits(own_GH[None])[0].log_softmax(-1)
        for depth in range(G):
            label = slot + 2 + depth
            if answer[0] <= label < answer[1]:
                p_D = p_TV[label - 1, ids_D]
                teacher_D = p_D / p_D.sum()
                kl = (teacher_D * (teacher_D.log() - log_q_GD[depth])).sum()
                found.append((torch.tensor(depth), torch.stack([kl, p_D.sum()])))
    return found


def test_the_loss_is_the_mean_divergence_at_each_depth() -> None:
    """With all anchors at all depths; a text's slots count at depth 0 wherever they are, an anchor
    only if its own token was written."""
    training, batch = made(Retention(num_anchors=99, ratio=1.0))
    sums = torch.zeros(3, 2)
    for row, (text, answer) in enumerate(zip(TEXTS, ANSWERS, strict=True)):
        for slot in range(len(text) - 1):
            is_anchor = answer[0] <= slot + 2 < answer[1]
            for depth, (kl, mass) in divergences(training, row, [slot]):
                if is_anchor or depth == 0:
                    sums[depth] += torch.stack([kl * mass, mass])
    wanted = (sums[:, 0] / sums[:, 1]).mean()
    found = training.loss(batch)
    torch.testing.assert_close(found.detach(), wanted, rtol=1e-4, atol=1e-5)
    found.backward()
    assert all(
        p.grad is not None and p.grad.isfinite().all() for p in training.network.parameters()
    )
    assert training.network.mask_hidden.grad is not None
    assert training.network.mask_hidden.grad.abs().sum() > 0


def test_deep_masks_are_fewer_and_have_those_before_them() -> None:
    training, batch = made(Retention(num_anchors=4, ratio=0.5, least=0.25), num=4)
    masks = training.masks(batch, 0)
    assert masks.depth_M.tolist() == [1, 1, 2, 3]
    for row, answer in enumerate(ANSWERS):
        by_depth = [set(masks.anchor_BM[row, masks.depth_M == d].tolist()) for d in (1, 2, 3)]
        assert by_depth[2] <= by_depth[1] <= by_depth[0]
        assert all(answer[0] <= anchor + 2 < answer[1] for anchor in by_depth[0])
    assert masks.exists_BM.all()
    few, _ = made(Retention(num_anchors=9, ratio=1.0, least=1.0), num=2)
    assert few.masks(batch, 0).exists_BM.sum(1).tolist() == [7, 3]


def test_anchors_follow_from_the_seed_and_the_batches_seen() -> None:
    training, batch = made(Retention(num_anchors=2))
    again, _ = made(Retention(num_anchors=2))
    losses = [training.loss(batch).item() for _ in range(4)]
    assert len(set(losses)) > 1
    again.module.load_state_dict(training.module.state_dict())
    assert training.loss(batch).item() == again.loss(batch).item()


def test_a_single_depth_has_no_masks() -> None:
    training, batch = made(Retention(), num=1)
    assert training.masks(batch, 0).depth_M.numel() == 0
    assert training.loss(batch).isfinite()

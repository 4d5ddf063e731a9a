"""Training block heads: a slot is trained on what the drafter drafts from, and on the target's
distribution at its own position.

Legend: B rows, T tokens, A blocks, N slots of a block, D draft vocabulary, V vocabulary.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from tiny_block_heads import DSPARK, reference_block, reference_logits, tiny_block_head
from tiny_heads import hidden_states, target_of
from tiny_models import full_logits, ragged_prompts, tiny
from torch import Tensor

from outrider.core.errors import InvalidParameterError
from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.formats.block import load_block, save_block
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.block import Anchors, BlockTraining
from outrider.train.heads.block_loss import BlockLoss, acceptance
from outrider.train.heads.calibrate import (
    calibration_loss,
    expected_calibration_error,
    temperature_of,
)
from outrider.train.heads.kind import Ground
from outrider.train.heads.kinds import find_kind
from outrider.train.heads.states import StateSample

FIXTURES = Path(__file__).parents[1] / "drafters" / "fixtures"
TARGET = target_of()
V = TARGET.num_tokens
KINDS = [{}, DSPARK]


def batch_of(head: BlockHead, rows: list[list[int]], first_answer: int = 0) -> StateBatch:
    """Rows whose tokens from ``first_answer`` on the target wrote."""
    samples = []
    for tokens in rows:
        both_TF = hidden_states(TARGET, tokens, (*head.target_layers, TARGET.num_layers))
        F = len(head.target_layers) * head.hidden_size
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


def training_of(head: BlockHead, loss: BlockLoss | None = None, **options: Any) -> BlockTraining:
    options = {"num_anchors": 32} | options
    return BlockTraining(head.network, head.vocabulary, TARGET, loss or BlockLoss(), **options)


def anchors_at(rows: list[list[int]]) -> Anchors:
    token_BA = torch.tensor(rows)
    return Anchors(token_BA, torch.ones_like(token_BA, dtype=torch.bool))


@torch.no_grad()
@pytest.mark.parametrize("options", KINDS, ids=["dflash", "dspark"])
def test_a_slot_computes_what_the_drafter_computes(options: dict[str, Any]) -> None:
    """Several blocks of two rows in one pass, against one pass per anchor."""
    head, rows = tiny_block_head(TARGET, 17, **options), ragged_prompts([12, 9], V)
    anchors = anchors_at([[5, 0, 3], [2, 4, 7]])
    h_BAKH = training_of(head).outputs(batch_of(head, rows), anchors)
    for b, tokens in enumerate(rows):
        for a, anchor in enumerate(anchors.token_BA[b].tolist()):
            wanted_NH = reference_block(head, TARGET, tokens[: anchor + 1])
            torch.testing.assert_close(
                h_BAKH[b, a], wanted_NH[head.config.first_slot :], rtol=1e-4, atol=1e-5
            )


@torch.no_grad()
@pytest.mark.parametrize("options", KINDS, ids=["dflash", "dspark"])
def test_the_loss_is_that_of_every_slot_at_its_own_position(options: dict[str, Any]) -> None:
    """Against a loop over anchors and slots, with p from the target's logits over all tokens."""
    head, rows, first = tiny_block_head(TARGET, 17, **options), ragged_prompts([12, 9], V), 4
    loss = BlockLoss(kl=0.3, tv=0.9, confidence=0.5 * bool(options), gamma=2.0)
    kl, tv, bce = [], [], []
    ids_D = head.vocabulary.target_ids_D
    for tokens in rows:
        p_TV = full_logits(TARGET.module, tokens).softmax(-1)
        for anchor in range(first - 1, len(tokens) - 1):
            h_NH = reference_block(head, TARGET, tokens[: anchor + 1])
            for k in range(min(head.config.num_slots, len(tokens) - 1 - anchor)):
                drafted = tokens[anchor + 1 : anchor + 1 + k]
                logits_V = reference_logits(head, TARGET, tokens[: anchor + 1], drafted)
                p_V, q_V = p_TV[anchor + k], logits_V.softmax(-1)
                weight = torch.tensor(-k / 2.0).exp()
                t_D = p_V[ids_D] / p_V[ids_D].sum()
                kl.append((weight * p_V[ids_D].sum(), (t_D * (t_D / q_V[ids_D]).log()).sum()))
                alpha = torch.minimum(p_V, q_V).sum()
                tv.append((weight, 1 - alpha))
                if options:
                    h_H = h_NH[head.config.first_slot + k]
                    before = torch.tensor(tokens[anchor + k])
                    a = head.network.confidence_logits(h_H, before).sigmoid()
                    bce.append((weight, -alpha * a.log() - (1 - alpha) * (1 - a).log()))

    def mean(pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
        weights, values = (torch.stack(list(each)) for each in zip(*pairs, strict=True))
        return (weights * values).sum() / weights.sum()

    wanted = 0.3 * mean(kl) + 0.9 * mean(tv) + (0.5 * mean(bce) if options else 0.0)
    found = training_of(head, loss).loss(batch_of(head, rows, first))
    torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "loss"),
    [
        ("dflash", BlockLoss(kl=1.0)),
        ("dspark", BlockLoss(kl=0.1, tv=0.9, confidence=1.0)),
    ],
)
def test_the_published_package_computes_the_same_loss(name: str, loss: BlockLoss) -> None:
    """The package's cross-entropy is with the target's argmax: KL from a point mass. It divides by
    the number of slots where we divide by their weights."""
    seen = load_file(FIXTURES / f"{name}-expected.safetensors")
    head = load_block(FIXTURES / name)
    N, first = head.config.block_size, head.config.first_slot
    counts = seen["mask_ANx"].bool()
    slot = (torch.arange(len(counts)) % N - first)[counts]
    p_ND, q_ND = seen["targets_ANxD"][counts], seen["logits_ANxD"][counts]
    confidence = seen["confidence_ANx"][counts] if "confidence_ANx" in seen else None
    argmax_ND = torch.full_like(p_ND, -torch.inf).scatter(1, p_ND.argmax(1, keepdim=True), 0.0)
    log_norm_N = p_ND.logsumexp(-1)
    hard = BlockLoss(kl=loss.kl)(argmax_ND, torch.zeros(len(p_ND)), q_ND, slot)
    soft = BlockLoss(0.0, loss.tv, loss.confidence)(p_ND, log_norm_N, q_ND, slot, confidence)
    share = loss.weights(slot).sum() / len(slot)
    torch.testing.assert_close((hard + soft) * share, seen["loss"][0], rtol=1e-4, atol=1e-6)


@torch.no_grad()
@pytest.mark.parametrize("name", ["dflash", "dspark"])
def test_the_published_package_computes_the_same_predictions(name: str) -> None:
    """Its two packed documents are rows here."""
    seen, head = load_file(FIXTURES / f"{name}-expected.safetensors"), load_block(FIXTURES / name)
    target = tiny(vocab_size=40, hidden_size=16, num_hidden_layers=3)
    target.module.get_input_embeddings().weight.copy_(seen["embed_VH"])
    if head.network.lm_head is None:
        target.module.get_output_embeddings().weight.copy_(seen["lm_head_DH"])
    training = BlockTraining(head.network, head.vocabulary, target, BlockLoss())
    N, first = head.config.block_size, head.config.first_slot
    chosen = seen["loss_mask_T"][:-N].nonzero()[:, 0].tolist()
    logits_AND = seen["logits_ANxD"].view(len(chosen), N, -1)[:, first:]
    for document in (range(5), range(5, len(seen["tokens_T"]))):
        blocks = [i for i, anchor in enumerate(chosen) if anchor in document]
        tokens_T = seen["tokens_T"][document]
        T = len(tokens_T)
        sample = StateSample(
            tokens_T,
            torch.ones(T, dtype=torch.bool),
            seen["hidden_TE"][document],
            seen["last_hidden_TH"][document],
            torch.zeros(T),
        )
        anchors = anchors_at([[chosen[i] - document[0] for i in blocks]])
        found = training.predictions(StateBatch.of([sample]), anchors)
        wanted = []
        for i in blocks:
            inside = document[-1] - chosen[i]
            wanted.append(logits_AND[i, : min(inside, N - first)])
        torch.testing.assert_close(found.q_logits_ND, torch.cat(wanted), rtol=1e-4, atol=1e-5)


def test_padding_changes_nothing() -> None:
    """A row alone has the gradient that it has beside a longer one, which counts no token."""
    head, rows = tiny_block_head(TARGET, 17, **DSPARK), ragged_prompts([7, 12], V)
    alone, both = batch_of(head, rows[:1]), batch_of(head, rows)
    both.answers_BT[1] = False
    gradients = []
    for batch in (alone, both):
        head.network.zero_grad()
        training_of(head, BlockLoss(0.1, 0.9, 1.0)).loss(batch).backward()
        grads = [parameter.grad for parameter in head.network.parameters()]
        gradients.append([grad.clone() for grad in grads if grad is not None])
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-6)


def test_every_weight_is_trained() -> None:
    head = tiny_block_head(TARGET, 17, **DSPARK)
    loss = training_of(head, BlockLoss(0.1, 0.9, 1.0)).loss(batch_of(head, ragged_prompts([12], V)))
    loss.backward()
    for name, parameter in head.network.named_parameters():
        assert parameter.grad is not None, name
        assert bool(parameter.grad.abs().sum() > 0), name


def test_the_loss_is_zero_where_the_head_is_the_target() -> None:
    """KL and TV; and only there."""
    logits_ND = torch.randn(6, 9)
    log_norm_N, slot_N = logits_ND.logsumexp(-1), torch.arange(6) % 3
    loss = BlockLoss(1.0, 1.0)
    assert abs(float(loss(logits_ND, log_norm_N, logits_ND + 1.5, slot_N))) < 1e-5
    assert float(loss(logits_ND, log_norm_N, logits_ND.flip(1), slot_N)) > 0.1


def test_the_confidence_is_best_at_the_acceptance() -> None:
    """Its gradient vanishes there, and α gets none."""
    p_ND, q_ND = torch.randn(5, 9), torch.randn(5, 9, requires_grad=True)
    log_norm_N, slot_N = p_ND.logsumexp(-1), torch.zeros(5)
    alpha_N = acceptance(p_ND.log_softmax(-1), q_ND).detach()
    confidence_N = alpha_N.logit().requires_grad_()
    loss = BlockLoss(0.0, 0.0, 1.0)(p_ND, log_norm_N, q_ND, slot_N, confidence_N)
    for_q, for_a = torch.autograd.grad(loss, (q_ND, confidence_N), allow_unused=True)
    assert for_q is None or not bool(for_q.any())
    torch.testing.assert_close(for_a, torch.zeros(5), atol=1e-6, rtol=0)


def test_the_gradient_equals_finite_differences() -> None:
    p_ND, slot_N = torch.randn(4, 7), torch.arange(4)
    log_norm_N = p_ND.logsumexp(-1) + 0.3
    loss = BlockLoss(0.4, 0.7, 1.0)

    def f(q_ND: Tensor, a_N: Tensor) -> Tensor:
        return loss(p_ND, log_norm_N, q_ND, slot_N, a_N)

    q_ND, a_N = torch.randn(4, 7, requires_grad=True), torch.randn(4, requires_grad=True)
    fixed_a = BlockLoss(0.4, 0.7, 0.0)
    (grad_ND,) = torch.autograd.grad(f(q_ND, a_N), q_ND)
    for n, d in [(0, 0), (2, 5), (3, 1)]:
        step = torch.zeros(4, 7)
        step[n, d] = 1e-2
        up, down = (
            fixed_a(p_ND, log_norm_N, q_ND.detach() + sign * step, slot_N) for sign in (1, -1)
        )
        assert abs(float((up - down) / 2e-2 - grad_ND[n, d])) < 1e-3


def test_a_resumed_run_draws_the_same_anchors() -> None:
    head, rows = tiny_block_head(TARGET, 17), ragged_prompts([40, 30], V)
    batch = batch_of(head, rows)
    one, other = (training_of(head, num_anchors=3, seed=5) for _ in range(2))
    first = float(one.loss(batch).detach())
    saved = {name: tensor.clone() for name, tensor in one.module.state_dict().items()}
    second = float(one.loss(batch).detach())
    other.module.load_state_dict(saved)
    assert float(other.loss(batch).detach()) == second != first


def test_anchors_precede_tokens_that_the_target_wrote() -> None:
    head = tiny_block_head(TARGET, 17)
    batch = batch_of(head, ragged_prompts([12, 6], V), first_answer=5)
    anchors = training_of(head).anchors(batch, 0)
    found = [sorted(t[e].tolist()) for t, e in zip(*anchors, strict=True)]
    assert found == [list(range(4, 11)), [4]]


class LateTeacher(BlockTraining):
    """MUT: the teacher of the position after."""

    def predictions(self, batch: StateBatch, anchors: Anchors) -> Any:
        rolled = {
            "final_BTH": batch.final_BTH.roll(1, 1),
            "log_norm_BT": batch.log_norm_BT.roll(1, 1),
        }
        return super().predictions(StateBatch(**{**vars(batch), **rolled}), anchors)


class SeesItsAnchor(BlockTraining):
    """MUT: the context includes the anchor's own hidden state."""

    def outputs(self, batch: StateBatch, anchors: Anchors) -> Tensor:
        rolled = {"hidden_BTF": batch.hidden_BTF.roll(-1, 1)}
        return super().outputs(StateBatch(**{**vars(batch), **rolled}), anchors)


class OwnToken(BlockTraining):
    """MUT: corrects a slot by its own token, not by the one before."""

    def _logits(self, h_NH: Tensor, previous_N: Tensor) -> Tensor:
        return super()._logits(h_NH, previous_N.roll(-1))


@torch.no_grad()
@pytest.mark.parametrize("wrong", [LateTeacher, SeesItsAnchor, OwnToken])
def test_a_shift_by_one_would_be_found(wrong: type[BlockTraining]) -> None:
    head = tiny_block_head(TARGET, 17, **DSPARK)
    batch = batch_of(head, ragged_prompts([12, 9], V))
    parts = head.network, head.vocabulary, TARGET, BlockLoss(0.1, 0.9)
    right, found = (kind(*parts).loss(batch) for kind in (BlockTraining, wrong))
    assert abs(float(found - right)) > 1e-3


@pytest.mark.parametrize("kind", ["dflash", "dspark"])
def test_a_few_steps_lower_the_loss(kind: str, tmp_path: Path) -> None:
    """A head of each kind, built as the trainer builds it; saved and read again."""
    row = find_kind(kind)
    options = {"draft_vocab_size": 17, "block_size": 4, "num_layers": 1}
    values = row.values(options | ({"markov_rank": 3} if kind == "dspark" else {}))
    training = row.build(Ground(TARGET, torch.arange(V), 0), **values)
    head = training.head()
    assert head.kind == row.method == kind
    assert head.target_layers == row.layers(TARGET, values)
    batch = batch_of(head, ragged_prompts([16] * 4, V))
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
    again = load_block(tmp_path)
    assert again.config.num_slots == head.config.num_slots


def test_wrong_options_are_named() -> None:
    ground = Ground(TARGET, torch.arange(V), 0)
    for kind, options, message in [
        ("dspark", {"gamma": 0.0}, "gamma"),
        ("dspark", {"tv": -1.0}, "tv=-1"),
        ("dflash", {"block_size": 1}, "block_size=1"),
        ("dflash", {"num_layers": 0}, "num_layers=0"),
        ("dflash", {"mask_token_id": 99}, "mask_token_id=99"),
    ]:
        row = find_kind(kind)
        with pytest.raises(InvalidParameterError, match=message):
            row.build(ground, **row.values(options))


def test_temperature_scaling_undoes_a_factor() -> None:
    """Logits three times too large are found out, and the calibration error falls."""
    generator = torch.Generator().manual_seed(0)
    true_N = 2 * torch.randn(4000, generator=generator).double()
    alpha_N = true_N.sigmoid()
    found = temperature_of(3 * true_N, alpha_N)
    assert abs(found - 3) < 1e-6
    assert expected_calibration_error((3 * true_N).sigmoid(), alpha_N) > 0.05
    assert expected_calibration_error((3 * true_N / found).sigmoid(), alpha_N) < 1e-6
    best = calibration_loss(3 * true_N, alpha_N, found)
    for other in (0.9 * found, 1.1 * found):
        assert calibration_loss(3 * true_N, alpha_N, other) > best


def test_calibration_divides_the_heads_weights() -> None:
    """The calibrated head is best at temperature 1, and is an ordinary head."""
    head = tiny_block_head(TARGET, 17, **DSPARK)
    training = training_of(head, BlockLoss(0.1, 0.9, 1.0))
    batches = [batch_of(head, ragged_prompts([14, 11], V, seed=seed)) for seed in range(2)]
    before = head.network.confidence_head.proj.weight.clone()
    temperature = training.calibrate(batches)
    torch.testing.assert_close(head.network.confidence_head.proj.weight * temperature, before)
    assert abs(training.calibrate(batches) - 1) < 1e-4


@pytest.mark.parametrize(("kind", "other"), [("dflash", "dspark"), ("dspark", "dflash")])
def test_a_head_is_trained_on_from_its_folder(kind: str, other: str, tmp_path: Path) -> None:
    """With its own shape, whatever the options say."""
    head = tiny_block_head(TARGET, 17, **(DSPARK if kind == "dspark" else {}))
    save_block(head, tmp_path, dtype=torch.float32)
    ground, start = Ground(TARGET, torch.arange(V), 0), {"start": str(tmp_path)}
    row = find_kind(kind)
    values = row.values(start)
    training = row.build(ground, **values)
    assert row.layers(TARGET, values) == head.target_layers
    for name, parameter in head.network.named_parameters():
        assert torch.equal(training.network.get_parameter(name), parameter)
    with pytest.raises(InvalidParameterError, match=f"of kind '{kind}'"):
        find_kind(other).build(ground, **find_kind(other).values(start))

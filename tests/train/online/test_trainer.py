"""Update steps on samples, and checkpoints that a kill at any moment leaves whole.

Legend: P positions.
"""

import copy
import errno
import os
import random
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from tiny_models import full_logits, tiny_module

from outrider.train import checkpoint
from outrider.train.losses import DIVERGENCES
from outrider.train.online import SavingError
from outrider.train.online.draft_model import DraftModelStudent
from outrider.train.online.samples import Sample
from outrider.train.online.trainer import DivergedError, Trainer

K = 8


def samples(num: int = 6, seed: int = 0) -> list[Sample]:
    """Samples whose distributions are those of a target at every third position."""
    target = tiny_module("llama", seed=5)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for _ in range(num):
        tokens_T = torch.randint(101, (20,), generator=generator)
        positions_P = torch.arange(4, 20, 3)
        log_p_TV = full_logits(target, tokens_T.tolist()).log_softmax(-1)
        top = log_p_TV[positions_P].topk(K)
        found.append(Sample(tokens_T, positions_P, top.indices.to(torch.int32), top.values, 101))
    return found


def trainer(divergence: str = "forward-kl", learning_rate: float = 3e-3) -> Trainer:
    return Trainer(DraftModelStudent(tiny_module("llama", seed=6)), divergence, learning_rate)


@pytest.mark.parametrize("divergence", DIVERGENCES)
def test_acceptance_rises_under_every_divergence(divergence: str) -> None:
    learner, batch = trainer(divergence), samples()
    before = learner.alpha(batch)
    losses = [learner.update(batch) for _ in range(12)]
    assert losses[-1] < losses[0]
    assert learner.alpha(batch) > before + 0.05
    assert learner.step == 12


def test_alpha_is_the_overlap_of_the_distributions() -> None:
    """With all tokens kept, it is Σ min(p, q) itself."""
    learner = trainer()
    (sample,) = samples(1)
    log_p_TV = full_logits(tiny_module("llama", seed=5), sample.tokens_T.tolist()).log_softmax(-1)
    top = log_p_TV[sample.positions_P].topk(101)
    full = Sample(sample.tokens_T, sample.positions_P, top.indices.to(torch.int32), top.values, 101)
    q_TV = full_logits(learner.module, sample.tokens_T.tolist()).softmax(-1)
    wanted = torch.minimum(log_p_TV.exp(), q_TV)[sample.positions_P].sum(1).mean()
    assert learner.alpha([full]) == pytest.approx(float(wanted), abs=1e-5)


def test_only_the_positions_of_a_sample_have_a_gradient() -> None:
    """Tokens behind the last position change nothing; the positions before it do."""
    (sample,) = samples(1)
    longer = Sample(
        torch.cat([sample.tokens_T, torch.tensor([7, 8, 9])]),
        sample.positions_P,
        sample.ids_PK,
        sample.log_p_PK,
        101,
    )
    moved = Sample(sample.tokens_T, sample.positions_P - 1, sample.ids_PK, sample.log_p_PK, 101)
    found = []
    for each in (sample, longer, moved):
        learner = trainer()
        learner.update([each])
        found.append(learner.weights()["model.layers.0.mlp.up_proj.weight"])
    torch.testing.assert_close(found[0], found[1], atol=1e-6, rtol=1e-5)
    assert not torch.allclose(found[0], found[2], atol=1e-6), "an off-by-one would be seen"


def test_a_loss_that_is_not_finite_leaves_the_weights_alone() -> None:
    learner, batch = trainer(), samples()
    learner.update(batch)
    before = learner.weights()
    bad = copy.deepcopy(batch[0])
    bad.log_p_PK[0, 0] = torch.nan
    with pytest.raises(DivergedError, match="not finite at step 2"):
        learner.update([*batch, bad])
    assert all(torch.equal(x, before[name]) for name, x in learner.weights().items())
    learner.update(batch)
    assert learner.step == 2


def test_a_resumed_trainer_goes_on_bit_for_bit(tmp_path: Path) -> None:
    whole = trainer()
    for number in range(4):
        whole.update(samples(2, seed=number))
    first = trainer()
    for number in range(2):
        first.update(samples(2, seed=number))
    first.save(tmp_path)
    second = Trainer(DraftModelStudent(tiny_module("llama", seed=9)), "forward-kl", 3e-3)
    second.resume(tmp_path)
    assert second.step == 2
    for number in range(2, 4):
        second.update(samples(2, seed=number))
    wanted = whole.weights()
    assert all(torch.equal(x, wanted[name]) for name, x in second.weights().items())


def test_a_checkpoint_of_another_draft_is_named(tmp_path: Path) -> None:
    trainer().save(tmp_path)
    student = DraftModelStudent(tiny_module("llama", num_hidden_layers=1))
    other = Trainer(student, "forward-kl", 1e-3)
    with pytest.raises(ValueError, match=r"of 2 layers.* not .* of 1 layers"):
        other.resume(tmp_path)


def test_a_full_disk_leaves_the_last_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner = trainer()
    learner.save(tmp_path)
    learner.update(samples(2))

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint.torch, "save", full)
        with pytest.raises(SavingError, match=r"about 0\.\d MB"):
            learner.save(tmp_path)
    resumed = trainer()
    resumed.resume(tmp_path)
    assert resumed.step == 0


STEPS = 30


def learn_and_save(folder: Path) -> None:
    """Resumes, and saves a checkpoint after each step."""
    learner = trainer()
    learner.resume(folder)
    for number in range(learner.step, STEPS):
        learner.update(samples(1, seed=number))
        learner.save(folder)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.parametrize(
    "kills", [4, pytest.param(20, marks=pytest.mark.slow)], ids=["4 times", "20 times"]
)
def test_killed_at_any_moment_it_ends_where_an_uninterrupted_one_does(
    kills: int, tmp_path: Path
) -> None:
    """SIGKILL at random moments, while steps are taken and a checkpoint is written after each."""
    rng = random.Random(1)
    context = get_context("fork")
    for _ in range(kills):
        process = context.Process(target=learn_and_save, args=(tmp_path,))
        process.start()
        process.join(rng.uniform(0, 0.25))
        process.kill()
        process.join()
        trainer().resume(tmp_path)  # a torn checkpoint would raise
    process = context.Process(target=learn_and_save, args=(tmp_path,))
    process.start()
    process.join()
    assert process.exitcode == 0
    whole, found = trainer(), trainer()
    for number in range(STEPS):
        whole.update(samples(1, seed=number))
    found.resume(tmp_path)
    assert found.step == STEPS
    wanted = whole.weights()
    assert all(torch.equal(x, wanted[name]) for name, x in found.weights().items())

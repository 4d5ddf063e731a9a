"""Resuming is bit-identical wherever the run was stopped; schedules; distillation."""

import math
import os
import signal
import subprocess
import sys

import numpy as np
import pytest
import torch

from outrider.train.checkpoint import CHECKPOINT
from outrider.train.data import Batches
from outrider.train.distill.objective import distillation
from outrider.train.distill.start import copy_embeddings
from outrider.train.loop import Interrupted, Settings, train
from outrider.train.losses import language_modelling
from outrider.train.models import Architecture, build_llama
from outrider.train.optim import Schedule

TINY = Architecture(32, 16, 24, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1)
SCHEDULE = Schedule(learning_rate=1e-2, steps=12, warmup_steps=2, decay_steps=4)
TOKENS = np.random.default_rng(0).integers(0, 32, 2000).astype(np.uint16)


def settings(**changes):
    return Settings(**{"schedule": SCHEDULE, "checkpoint_every": 3, **changes})


def run(folder, hook=lambda step: None, **changes):
    """Train the tiny model in `folder`, calling `hook` before every step; returns its weights."""
    model = build_llama(TINY, seed=1)
    batches = Batches(TOKENS, 4, 16, seed=0)

    def hooked(step):
        hook(step)
        return batches(step)

    train("tiny", model, language_modelling(model), hooked, settings(**changes), folder)
    return model.state_dict()


def assert_same(left, right):
    assert all(torch.equal(left[name], right[name]) for name in left)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory):
    return run(tmp_path_factory.mktemp("whole"))


@pytest.mark.parametrize("stop", [1, 4, 11])
def test_crash_then_resume_is_bit_identical(tmp_path, uninterrupted, stop):
    def crash(step):
        if step == stop:
            raise MemoryError

    with pytest.raises(MemoryError):
        run(tmp_path, crash)
    assert_same(run(tmp_path), uninterrupted)


def test_kill_9_then_resume_is_bit_identical(tmp_path, uninterrupted):
    """A separate process is killed while it leaves a half-written checkpoint."""
    code = (
        "import os, signal, sys; from pathlib import Path; import test_loop\n"
        "test_loop.run(Path(sys.argv[1]), "
        "lambda step: os.kill(os.getpid(), signal.SIGKILL) if step == 8 else None)"
    )
    here = os.path.dirname(__file__)
    path = os.pathsep.join([here, os.getcwd()])
    process = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        check=False,
    )
    assert process.returncode == -signal.SIGKILL, process.stderr.decode()
    assert torch.load(tmp_path / CHECKPOINT)["step"] == 6
    (tmp_path / f"{CHECKPOINT}.partial").write_bytes(b"half a checkp")
    assert_same(run(tmp_path), uninterrupted)


def test_ctrl_c_saves_and_resumes(tmp_path, uninterrupted):
    with pytest.raises(Interrupted, match="6"):
        run(tmp_path, lambda step: os.kill(os.getpid(), signal.SIGINT) if step == 5 else None)
    assert torch.load(tmp_path / CHECKPOINT)["step"] == 6
    assert_same(run(tmp_path), uninterrupted)


def test_a_run_with_other_settings_is_not_resumed(tmp_path):
    run(tmp_path, identity={"seed": 0})
    with pytest.raises(ValueError, match="a run with seed 0, not 1"):
        run(tmp_path, identity={"seed": 1})


def test_a_gradient_that_is_not_finite_stops_the_run(tmp_path):
    model = build_llama(TINY, seed=1)
    with torch.no_grad():
        model.model.norm.weight.fill_(float("nan"))
    batches = Batches(TOKENS, 4, 16, seed=0)
    with pytest.raises(ValueError, match="not finite at step 0"):
        train("tiny", model, language_modelling(model), batches, settings(), tmp_path)


def test_the_schedule_warms_up_stays_and_decays():
    schedule = Schedule(learning_rate=1.0, steps=100, warmup_steps=9, decay_steps=49)
    rates = [schedule(step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert rates[10:50] == [1.0] * 40
    assert rates[-1] == pytest.approx(0.02)
    with pytest.raises(ValueError, match="do not fit into 10 steps"):
        Schedule(1.0, steps=10, warmup_steps=6, decay_steps=6)


def test_the_learning_rate_falls_along_a_cosine():
    schedule = Schedule(1.0, steps=100, warmup_steps=9, decay_steps=90, decay="cosine")
    rates = [schedule(step) for step in range(100)]
    assert rates[:10] == pytest.approx([0.1 * (i + 1) for i in range(10)], abs=0.01)
    for step in (30, 55, 80):
        angle = math.pi * (step - 9) / 91
        assert rates[step] == pytest.approx((1 + math.cos(angle)) / 2)
    assert 0 < rates[-1] < 1e-3


def test_distillation_moves_the_draft_towards_the_target(tmp_path):
    target = build_llama(TINY, seed=5)
    with torch.no_grad():
        target.model.norm.weight.mul_(30)  # a distribution with something to learn
    draft = build_llama(Architecture(32, 16, 24, 1, 2, 1), seed=6)
    objective = distillation(draft, target)
    tokens_BT = Batches(TOKENS, 16, 16, seed=9)(0)
    before = objective(tokens_BT).item()
    frozen = {name: value.clone() for name, value in target.state_dict().items()}
    train("draft", draft, objective, Batches(TOKENS, 4, 16, seed=0), settings(), tmp_path)
    assert objective(tokens_BT).item() < 0.9 * before
    assert_same(target.state_dict(), frozen)


def test_embeddings_are_copied_only_between_equal_widths():
    target = build_llama(TINY, seed=5)
    draft = build_llama(Architecture(32, 16, 24, 1, 2, 1), seed=6)
    assert copy_embeddings(target, draft)
    assert torch.equal(draft.lm_head.weight, target.lm_head.weight)
    narrow = build_llama(Architecture(32, 8, 24, 1, 2, 1), seed=6)
    assert not copy_embeddings(target, narrow)

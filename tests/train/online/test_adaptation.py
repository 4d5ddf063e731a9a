"""``engine.adapt``: acceptance rises, outputs stay, crashes disturb nobody, folders are resumed."""

import errno
import json
import os
import random
import signal
from collections.abc import Iterator
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from online_helpers import QUICK, disturbed, pair, sampled
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids, uniform_method

import outrider
from outrider import Engine
from outrider.core.errors import IncompatibleError, InvalidParameterError, OutriderWarning
from outrider.runtime import HFModel
from outrider.runtime.weights import plain_weights
from outrider.train.online import Adaptation, AdaptSettings, SavingError, adaptable_methods
from outrider.train.online import learner as learner_module
from outrider.train.online.files import load_weights, save_weights
from outrider.train.online.learner import Crashed, Published, version_path
from outrider.train.online.process import ProcessWorker
from outrider.verifiers import Typical

PROMPTS = ragged_prompts([9] * 10)


def traffic(engine: Engine, adaptation: Adaptation, times: int) -> list[float]:
    """α of each pass over the prompts; what is collected is learned in between."""
    alphas = []
    for _ in range(times):
        alphas.append(engine.generate(PROMPTS, sampled()).stats.alpha)
        assert adaptation.flush(120)
    return alphas


@pytest.mark.parametrize("divergence", ["forward-kl", pytest.param("lk", marks=pytest.mark.slow)])
def test_acceptance_rises_on_a_stationary_stream(divergence: str) -> None:
    engine = engine_of(*pair())
    with engine.adapt(settings=replace(QUICK, divergence=divergence)) as adaptation:
        alphas = traffic(engine, adaptation, 5)
        state = adaptation.state
    assert alphas[-1] > alphas[0] + 0.05
    assert state.status == "running"
    assert state.version >= 4
    assert state.step >= 8
    assert state.tokens_seen > 500
    assert state.restarts == state.samples_dropped == 0
    numbers = [version.number for version in state.versions]
    assert numbers == sorted(numbers)
    assert numbers[0] == 0
    assert all(version.gain is None or version.gain >= 0 for version in state.versions)
    assert state.versions[0].alpha == pytest.approx(alphas[0], abs=0.02)
    assert [point.tokens for point in state.history] == sorted(p.tokens for p in state.history)
    assert state.history[-1].alpha > state.history[0].alpha
    assert adaptation.state.status == "stopped"


def test_greedy_outputs_stay_those_of_plain_decoding() -> None:
    target, draft = pair()
    wanted = token_ids(engine_of(target).generate(PROMPTS, greedy(32)))
    engine = engine_of(target, draft)
    with engine.adapt(settings=replace(QUICK, learning_rate=1e-2)) as adaptation:
        for _ in range(4):
            assert token_ids(engine.generate(PROMPTS, greedy(32))) == wanted
            assert adaptation.flush(120)
        assert adaptation.state.version > 0
    assert token_ids(engine.generate(PROMPTS, greedy(32))) == wanted


def test_another_engine_with_the_same_draft_keeps_its_weights() -> None:
    target, draft = pair()
    before = plain_weights(draft.module)
    other, adapted = engine_of(target, draft), engine_of(target, draft)
    wanted = other.generate(PROMPTS, sampled())
    with adapted.adapt(settings=QUICK) as adaptation:
        traffic(adapted, adaptation, 2)
        assert adaptation.state.version > 0
        found = other.generate(PROMPTS, sampled())
    assert token_ids(found) == token_ids(wanted)
    assert found.stats.alpha == wanted.stats.alpha
    assert other.draft is not None
    assert other.draft.module is draft.module
    assert all(torch.equal(x, before[name]) for name, x in plain_weights(draft.module).items())
    assert adapted.draft is not None
    assert adapted.draft.module is not draft.module


def test_nothing_changes_before_the_first_version() -> None:
    target, draft = pair()
    wanted = engine_of(target, draft).generate(PROMPTS, sampled())
    engine = engine_of(target, draft)
    with engine.adapt(settings=replace(QUICK, publish_every=1000)):
        found = engine.generate(PROMPTS, sampled())
    assert token_ids(found) == token_ids(wanted)
    assert found.stats.alpha == wanted.stats.alpha
    assert engine.observed.observer is None


# ------------------------------------------------------------------------------- rolling back


def test_weights_that_are_accepted_less_are_rolled_back(tmp_path: Path) -> None:
    """Random weights arrive as a version, as a damaged trainer might publish them. Greedy and
    sampled requests alternate, whose α differ. The trainer then goes on from the weights that are
    back."""
    target, _ = pair()
    engine = engine_of(target, disturbed(target, 0.05))
    settings = replace(QUICK, batch_size=4096, trial_rounds=10_000)  # no step before the flush
    with engine.adapt(tmp_path, settings) as adaptation:
        good = engine.generate(PROMPTS, sampled()).stats.alpha
        path = version_path(tmp_path, 70)
        save_weights(path, plain_weights(tiny(seed=9).module))
        adaptation._handle(Published(70, 700, path, 0.1))
        bad = []
        with pytest.warns(OutriderWarning, match="version 70 .* version 0, which is back"):  # noqa: PT031
            while adaptation.state.on_trial or not bad:
                for sampling in (sampled(), greedy(48)):
                    bad.append(engine.generate(PROMPTS, sampling).stats.alpha)
        again = engine.generate(PROMPTS, sampled()).stats.alpha
        state = adaptation.state
        adaptation.flush(120)
        assert adaptation.state.loss is not None
        assert adaptation.state.loss < 2
    assert good > 0.4
    assert min(bad[:2]) < good - 0.1
    assert again == pytest.approx(good, abs=0.02)
    assert [(v.number, v.status) for v in state.versions] == [(70, "rolled back"), (0, "serving")]
    assert state.versions[0].alpha is not None
    assert state.versions[0].alpha < 0.3
    document = json.loads((tmp_path / "versions.json").read_text())
    assert document["versions"][-1]["number"] == 0


def test_versions_take_over_after_their_trials() -> None:
    target, draft = pair()
    wanted = token_ids(engine_of(target).generate(PROMPTS, greedy(40)))
    engine = engine_of(target, draft)
    with engine.adapt(settings=replace(QUICK, trial_rounds=24)) as adaptation:
        alphas = traffic(engine, adaptation, 5)
        assert token_ids(engine.generate(PROMPTS, greedy(40))) == wanted
        state = adaptation.state
    assert alphas[-1] > alphas[0] + 0.04
    taken = [version for version in state.versions if version.number]
    assert len(taken) >= 2
    assert all(version.alpha_before is not None for version in taken)


# ------------------------------------------------------------------------- crashes and errors


@pytest.mark.slow
def test_a_killed_trainer_disturbs_nobody(tmp_path: Path) -> None:
    """SIGKILL while it takes steps: outputs stay, a warning names it, and it starts again from its
    checkpoint."""
    target, draft = pair()
    wanted = token_ids(engine_of(target).generate(PROMPTS, greedy(32)))
    engine = engine_of(target, draft)
    settings = replace(QUICK, where="process", batch_size=4)
    with engine.adapt(tmp_path, settings) as adaptation:
        traffic(engine, adaptation, 2)
        steps = adaptation.state.step
        assert steps > 0
        worker = adaptation._worker
        assert isinstance(worker, ProcessWorker)
        engine.generate(PROMPTS, sampled())  # more to learn from, so that it is busy
        os.kill(worker.pid, signal.SIGKILL)
        with adaptation._condition:
            assert adaptation._condition.wait_for(lambda: adaptation._restarts, 60)
        with pytest.warns(OutriderWarning, match=r"crashed \(process \d+ ended with signal 9\)"):
            assert token_ids(engine.generate(PROMPTS, greedy(32))) == wanted
        alphas = traffic(engine, adaptation, 2)
        state = adaptation.state
        assert state.status == "running"
        assert state.restarts == 1
        assert state.step > steps
        assert alphas[-1] > 0.25
    assert worker is not adaptation._worker
    assert {file.name for file in tmp_path.iterdir()} == {
        "checkpoint.pt",
        "trainer.log",
        "versions",
        "versions.json",
    }


class Dies:
    """A worker whose learner crashes at once, every time."""

    num_dropped = 0

    def __init__(self, handle) -> None:  # type: ignore[no-untyped-def]
        self.handle = handle

    def post(self, message: object) -> None:
        self.handle(Crashed("out of memory"))

    def close(self, timeout: float) -> None:
        """Nothing runs."""


def test_a_trainer_that_crashes_again_and_again_stays_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Adaptation, "_started", lambda self: Dies(self._handle))
    target, draft = pair()
    wanted = token_ids(engine_of(target).generate(PROMPTS, greedy(16)))
    engine = engine_of(target, draft)
    adaptation = engine.adapt(settings=QUICK)
    with pytest.warns(OutriderWarning) as record:  # noqa: PT031
        for _ in range(2):
            assert token_ids(engine.generate(PROMPTS, greedy(16))) == wanted
    messages = [str(each.message) for each in record]
    assert sum("starts again" in message for message in messages) == 3
    assert sum("adaptation is off" in message for message in messages) == 1
    assert "out of memory" in adaptation.state.status
    assert not adaptation.flush(10)
    adaptation.stop()


def test_a_loss_that_is_not_finite_stops_adaptation_only(monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(*pair())
    adaptation = engine.adapt(settings=replace(QUICK, learning_rate=1e30))
    with pytest.warns(OutriderWarning, match="not finite at step 2.*lower learning_rate"):  # noqa: PT031
        for _ in range(3):
            results = engine.generate(PROMPTS, sampled())
            adaptation.flush(120)
        engine.generate(PROMPTS, sampled(4))
    assert adaptation.state.version == 0
    assert results.stats.alpha > 0.2
    assert adaptation.state.status.startswith("the loss of the draft is not finite")
    adaptation.stop()


def test_a_full_disk_stops_adaptation_only(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(*pair())
    adaptation = engine.adapt(tmp_path, QUICK)
    traffic(engine, adaptation, 1)
    version = adaptation.state.version

    def full(*arguments: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("outrider.train.online.files.save_file", full)
        with pytest.warns(OutriderWarning, match=r"No space left on device; it needs about 0\.\d"):  # noqa: PT031
            engine.generate(PROMPTS, sampled())
            assert not adaptation.flush(120)
            engine.generate(PROMPTS, sampled(4))
    adaptation.stop()
    with engine.adapt(tmp_path, QUICK) as again:
        assert again.state.version == version
        assert again.state.status == "running"


# ------------------------------------------------------------------------------------ folders


def test_a_folder_is_resumed(tmp_path: Path) -> None:
    target, draft = pair()
    first = engine_of(target, draft)
    with first.adapt(tmp_path, QUICK) as adaptation:
        traffic(first, adaptation, 3)
        wanted = first.generate(PROMPTS, sampled()).stats.alpha
        before = adaptation.state
    second = engine_of(target, draft)
    with second.adapt(tmp_path, QUICK) as adaptation:
        assert adaptation.state.version == before.version
        assert second.generate(PROMPTS, sampled()).stats.alpha == wanted
        adaptation.flush(120)
        after = adaptation.state
    assert after.step > before.step
    assert [version.number for version in after.versions][: len(before.versions)] == [
        version.number for version in before.versions
    ]


def test_only_weights_are_kept_on_disk(tmp_path: Path) -> None:
    """Files of weights, the optimiser's numbers and measurements; old versions are deleted. A
    prompt's tokens are in none of them."""
    engine = engine_of(*pair())
    with engine.adapt(tmp_path, QUICK) as adaptation:
        traffic(engine, adaptation, 4)
        assert adaptation.state.version > 5
    files = [file for file in tmp_path.rglob("*") if file.is_file()]
    names = {str(file.relative_to(tmp_path)) for file in files}
    weights = {name for name in names if name.startswith("versions/")}
    assert names - weights == {"checkpoint.pt", "versions.json"}
    assert 1 <= len(weights) <= 4
    state = torch.load(tmp_path / "checkpoint.pt", weights_only=True)
    assert set(state) == {"step", "model", "optimizers", "rng", "identity"}


def test_a_folder_of_another_draft_is_named(tmp_path: Path) -> None:
    target, draft = pair()
    engine_of(target, draft).adapt(tmp_path, QUICK).stop()
    other = engine_of(target, tiny(num_hidden_layers=1))
    with pytest.raises(IncompatibleError, match=r"of 2 layers.* not .* of 1 layers"):
        other.adapt(tmp_path, QUICK)
    with pytest.raises(IncompatibleError, match="'forward-kl', not 'tv'"):
        engine_of(target, draft).adapt(tmp_path, replace(QUICK, divergence="tv"))


def test_a_folder_whose_weights_are_gone(tmp_path: Path) -> None:
    target, draft = pair()
    engine_of(target, draft).adapt(tmp_path, QUICK).stop()
    version_path(tmp_path, 0).unlink()
    with pytest.raises(IncompatibleError, match="says that version 0 serves"):
        engine_of(target, draft).adapt(tmp_path, QUICK)


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SavingError, match=r"cannot write .*file/versions"):
        engine_of(*pair()).adapt(file, QUICK)


def adapt_until_killed(folder: Path) -> None:
    engine = engine_of(*pair())
    adaptation = engine.adapt(folder, QUICK)
    while adaptation.flush(60):
        engine.generate(PROMPTS[:4], sampled(24))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="kills a forked process")
@pytest.mark.slow
def test_killed_at_any_moment_a_folder_is_resumed(tmp_path: Path) -> None:
    """SIGKILL of the whole process, engine and trainer, at twenty random moments: the folder always
    resumes, its weights are whole, and no step is lost that was saved."""
    rng = random.Random(2)
    steps = 0
    for _ in range(20):
        process = get_context("fork").Process(target=adapt_until_killed, args=(tmp_path,))
        process.start()
        process.join(rng.uniform(0.1, 1.2))
        process.kill()
        process.join()
        engine = engine_of(*pair())
        with engine.adapt(tmp_path, QUICK) as adaptation:
            assert adaptation.flush(60)
            state = adaptation.state
            assert state.status == "running"
            assert state.step >= steps
            assert engine.draft is not None
            served = load_weights(version_path(tmp_path, state.version))
            found = plain_weights(engine.draft.module)
            assert all(torch.equal(x, served[name]) for name, x in found.items())
            assert all(bool(x.isfinite().all()) for x in found.values())
        assert not list(tmp_path.rglob("*.partial"))
        steps = state.step


def test_the_saved_draft_is_an_ordinary_model(tmp_path: Path) -> None:
    target, draft = pair()
    engine = engine_of(target, draft)
    with engine.adapt(settings=QUICK) as adaptation:
        traffic(engine, adaptation, 3)
        wanted = engine.generate(PROMPTS, sampled())
        adaptation.save(tmp_path / "draft")
    module = type(draft.module).from_pretrained(tmp_path / "draft")
    saved = engine_of(target, HFModel(module, name="saved"))
    found = saved.generate(PROMPTS, sampled())
    assert token_ids(found) == token_ids(wanted)
    assert found.stats.alpha == pytest.approx(wanted.stats.alpha, abs=1e-6)


def test_a_draft_that_cannot_be_saved(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = engine_of(*pair())

    def full(*arguments: object, **settings: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with engine.adapt(settings=QUICK) as adaptation:
        monkeypatch.setattr(type(engine.target.module), "save_pretrained", full)
        with pytest.raises(SavingError, match="it needs about"):
            adaptation.save(tmp_path / "draft")
    assert list(tmp_path.iterdir()) == []


# ----------------------------------------------------------------------- what is not supported


@pytest.mark.parametrize("method", ["plain", "prompt-lookup", "mentored", "ensemble"])
def test_methods_that_are_not_adapted(method: str) -> None:
    target, draft = pair()
    needs = outrider.METHODS[method].needs_draft
    with pytest.raises(IncompatibleError, match=f"method '{method}'.*supports .*speculative"):
        engine_of(target, draft if needs else None, method).adapt(settings=QUICK)


def test_methods_for_other_vocabularies_are_not_adapted() -> None:
    assert not {"tli", "slem", "follow"} & set(adaptable_methods())
    assert {"speculative", "block", "coupled", "sample-match", "sequoia"} <= set(
        adaptable_methods()
    )


def test_a_lossy_rule_of_the_users_own() -> None:
    engine = engine_of(*pair(), verifier=Typical())
    with pytest.raises(IncompatibleError, match="lossy"):
        engine.adapt(settings=QUICK)


def test_a_method_of_the_users_own_without_a_draft() -> None:
    with pytest.raises(IncompatibleError, match="method 'uniform' has no draft model"):
        engine_of(tiny(), None, uniform_method()).adapt(settings=QUICK)


def test_adapting_twice() -> None:
    engine = engine_of(*pair())
    with engine.adapt(settings=QUICK), pytest.raises(IncompatibleError, match="already"):
        engine.adapt(settings=QUICK)
    engine.adapt(settings=QUICK).stop()


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("divergence", "kl"),
        ("where", "thread"),
        ("batch_size", 0),
        ("batch_size", 2.5),
        ("replay", 1.0),
        ("replay", -0.1),
        ("learning_rate", 0),
        ("learning_rate", float("nan")),
        ("top_k", 0),
        ("false_alarm", 0.0),
        ("niceness", 20),
        ("max_tokens_per_second", "fast"),
    ],
)
def test_settings_outside_their_domain(name: str, value: object) -> None:
    with pytest.raises(InvalidParameterError, match=f"{name}="):
        AdaptSettings(**{name: value})  # type: ignore[arg-type]


@pytest.mark.parametrize("method", ["block", "sequoia", "staged", "hybrid"])
def test_other_methods_learn_too(method: str) -> None:
    assert method in adaptable_methods()
    engine = engine_of(*pair(), method)
    with engine.adapt(settings=QUICK) as adaptation:
        traffic(engine, adaptation, 2)
        assert adaptation.state.version > 0
        assert adaptation.state.tokens_seen > 50


def test_an_engine_of_another_method_drafts_with_the_adapted_draft() -> None:
    target, draft = pair()
    engine = engine_of(target, draft)
    with engine.adapt(settings=QUICK) as adaptation:
        traffic(engine, adaptation, 3)
        assert adaptation.state.version > 0
    assert engine.draft is not None
    adapted, before = plain_weights(engine.draft.module), plain_weights(draft.module)
    other = engine.with_method(outrider.METHODS["block"])
    assert other.draft is not None
    found = plain_weights(other.draft.module)
    assert all(torch.equal(x, adapted[name]) for name, x in found.items())
    assert any(not torch.equal(x, before[name]) for name, x in found.items())
    assert engine.with_method(outrider.METHODS["plain"]).draft is None


def test_new_weights_that_are_worse_on_what_was_held_out_are_not_published(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    measured: Iterator[float] = iter(0.9 - 0.01 * number for number in range(10_000))
    monkeypatch.setattr(learner_module.Trainer, "alpha", lambda self, samples: 1 - next(measured))
    engine = engine_of(*pair())
    with engine.adapt(settings=QUICK) as adaptation:
        traffic(engine, adaptation, 2)
        published = adaptation.state.version
    assert published <= 1, "the later weights measure lower than the earlier ones"


def test_a_governor_that_nobody_asked_for_leaves_the_lengths_alone_meanwhile() -> None:
    """Rounds without drafts teach nothing; once adaptation stops, the governor chooses again."""
    engine = engine_of(*pair(), γ="auto-repeatable")  # type: ignore[arg-type]
    free = replace(sampled(), seed=None)
    with engine.adapt(settings=QUICK) as adaptation:
        stats = engine.generate(PROMPTS, free).stats
        assert stats.believed_rounds == 0
        assert adaptation.flush(120)
        assert adaptation.state.step > 0
    assert engine.generate(PROMPTS, free).stats.believed_rounds > 0

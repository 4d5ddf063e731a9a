"""What ends a sharded run: a rank that dies, ranks that differ, models without a plan."""

import os
import re
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from rank_processes import RankProcesses
from test_sharded import PROMPTS, SAMPLED, models, ranks, run, tokens  # noqa: F401 (fixtures)
from tiny_models import greedy

import outrider
from outrider import Engine, Sampling
from outrider.cluster import sharded
from outrider.cluster.sharded import ranks as ranks_module
from outrider.cluster.sharded.launch import Launch, check_size
from outrider.cluster.sharded.lockstep import END, leading
from outrider.cluster.sharded.remote_draft import RankZeroModel
from outrider.core.errors import (
    IncompatibleError,
    InvalidParameterError,
    OutOfMemoryError,
    PromptError,
    RankError,
    RankLostError,
    UnsupportedModelError,
)
from outrider.runtime import HFModel, load_model
from outrider.runtime.forward_batch import ForwardBatch

LIMIT = 30
"""Seconds within which a rank that dies is to be reported."""


class Dies:
    """A logits processor that kills or stops one of the ranks after a few tokens."""

    def __init__(self, rank: int, number: signal.Signals) -> None:
        self.rank, self.number = rank, number

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        if os.environ["RANK"] == str(self.rank) and input_ids.shape[1] > 12:
            os.kill(os.getpid(), self.number)
        return scores


class Differs:
    """A logits processor that is another on each rank."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        return scores.roll(int(os.environ["RANK"]), -1)


def with_processor(folder: Path, processor: Any) -> tuple[float, Any]:
    """What a rank does: the seconds until the run is over, and how it ended."""

    def main(engine: Engine) -> None:
        engine.generate([PROMPTS[0]], greedy(30, processors=[processor], stateless=True))

    began = time.monotonic()
    try:
        run(folder, main, "llama", {"timeout": 5.0})
    except Exception as error:
        seconds = time.monotonic() - began
        if stopped := re.search(r"process (\d+)", str(error)):
            with suppress(ProcessLookupError):
                os.kill(int(stopped[1]), signal.SIGKILL)
        return seconds, error
    return time.monotonic() - began, None


@pytest.mark.parametrize(
    ("dead", "number"), [(1, signal.SIGKILL), (0, signal.SIGKILL), (1, signal.SIGSTOP)]
)
def test_a_rank_that_is_gone_is_reported(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
    dead: int,
    number: signal.Signals,
) -> None:
    """Killed, or stopped, as a machine without power is."""
    found = ranks.run(with_processor, models, Dies(dead, number), size=2)
    assert found[dead] == "dead"
    seconds, error = found[1 - dead]
    assert isinstance(error, RankLostError)
    assert f"rank {dead}" in str(error)
    assert "died or does not answer" in str(error)
    assert seconds < LIMIT


def test_ranks_that_emit_other_tokens_end_the_run(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
) -> None:
    (_, ours), (_, theirs) = ranks.run(with_processor, models, Differs(), size=2)
    assert isinstance(theirs, RankError)
    assert "rank 1 has emitted other tokens than rank 0" in str(theirs)
    assert isinstance(ours, RankLostError)
    assert "rank 1" in str(ours)


def attempt(folder: Path, target: str, settings: dict[str, Any], version: str) -> Any:
    """What a rank does: how a run ends that is asked for one thing per rank."""
    outrider_version, ranks_module.__version__ = ranks_module.__version__, version
    try:
        return run(folder, tokens, target, settings)
    finally:
        ranks_module.__version__ = outrider_version


def test_different_versions_are_named(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
) -> None:
    for error in ranks.run(attempt, models, "llama", {}, size=2, per_rank=["1.0", "2.0"]):
        assert isinstance(error, RankError)
        assert str(error) == (
            "rank 1 has outrider 2.0 and rank 0 has outrider 1.0: install the same versions "
            "everywhere"
        )


def ask(folder: Path, target: str, settings: dict[str, Any]) -> Any:
    return run(folder, tokens, target, settings)


@pytest.mark.parametrize(
    ("size", "target", "settings", "kind", "message"),
    [
        (2, "gpt2", {}, UnsupportedModelError, "gpt2.*no tensor-parallel plan"),
        (3, "llama", {}, RankError, "4 attention heads, which 3 processes cannot share"),
        (2, "llama", {"tensor_parallel": 4}, RankError, "tensor_parallel=4 needs 4.*2 were"),
        (2, "llama", {"compile": "auto"}, InvalidParameterError, "compile='auto' does not work"),
        (2, "llama", {"quantize_target": "int8"}, InvalidParameterError, "quantize_target='int8'"),
        (2, "llama", {"draft_placement": "rank1"}, InvalidParameterError, "draft_placement"),
        (
            2,
            "llama",
            {"draft_placement": "rank0", "prefix_cache": "1MiB"},
            InvalidParameterError,
            "prefix_cache='1MiB' needs draft_placement='replicated'",
        ),
    ],
)
def test_bad_input_raises_on_all_ranks(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
    size: int,
    target: str,
    settings: dict[str, Any],
    kind: type[Exception],
    message: str,
) -> None:
    for error in ranks.run(ask, models, target, settings, size=size):
        assert isinstance(error, kind | RankLostError), repr(error)
        assert re.search(message, str(error)), str(error)


@contextmanager
def connecting_by(connect: Any) -> Iterator[None]:
    """Makes process groups by another function."""
    before, ranks_module.dist.init_process_group = ranks_module.dist.init_process_group, connect
    try:
        yield
    finally:
        ranks_module.dist.init_process_group = before


def without_group(folder: Path) -> Any:
    """What a rank does: how a run ends in which the process group cannot be made."""

    def broken(*arguments: Any, **settings: Any) -> None:
        raise RuntimeError("Connection closed by peer")

    with connecting_by(broken):
        return run(folder, tokens, "llama", {})


def test_a_process_group_that_cannot_be_made_is_an_error_of_the_run(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
) -> None:
    for error in ranks.run(without_group, models, size=2):
        assert isinstance(error, RankLostError)
        assert "Connection closed by peer" in str(error)


def last_to_connect(folder: Path, last: bool) -> Any:
    """What a rank does: it asks for something wrong. The last rank to have a process group goes on
    when the other has met it or has left."""
    connect = ranks_module.dist.init_process_group
    met, left = (["outrider/met/group/2/1"], ["outrider/closed"])

    def slowly(*arguments: Any, store: Any, **settings: Any) -> None:
        connect(*arguments, store=store, **settings)
        while last and not store.underlying_store.check(met):
            assert not store.underlying_store.check(left), "rank 1 left"

    with connecting_by(slowly):
        return run(folder, tokens, "llama", {"draft_placement": "rank1"})


def test_no_rank_leaves_while_another_connects(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
) -> None:
    for error in ranks.run(last_to_connect, models, size=2, per_rank=[True, False]):
        assert isinstance(error, InvalidParameterError | RankLostError), repr(error)
        assert "draft_placement" in str(error)


def ask_apart(folder: Path, method: str) -> Any:
    return run(folder, tokens, "llama", {"method": method})


def test_ranks_that_are_asked_for_different_things(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
) -> None:
    found = ranks.run(ask_apart, models, size=2, per_rank=["speculative", "block"])
    for error in found:
        assert isinstance(error, RankError)
        assert "rank 1 has method 'block' and rank 0 has method 'speculative'" in str(error)


def ask_with(folder: Path, settings: dict[str, Any]) -> Any:
    return run(folder, tokens, "llama", settings)


def test_settings_that_one_rank_leaves_out_are_compared(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
) -> None:
    settings = [{}, {"options": {"budget": 0.5}}]
    for error in ranks.run(ask_with, models, size=2, per_rank=settings):
        assert isinstance(error, RankError)
        assert "rank 1 has options {'budget': 0.5} and rank 0 has options None" in str(error)


def misuse(folder: Path) -> Any:
    """What a rank does: the errors of requests and calls that a sharded target cannot have."""

    def main(engine: Engine) -> list[Exception]:
        errors: list[Exception] = []
        calls: list[Any] = [
            lambda: engine.generate([[]]),
            lambda: engine.generate([PROMPTS[0]], Sampling(processors=[lambda ids, x: x])),
            lambda: engine.prompt_logprobs(torch.tensor(PROMPTS[0])),
            lambda: engine.with_method(engine.method),
            lambda: engine.adapt(),
        ]
        for call in calls:
            try:
                call()
            except Exception as error:
                errors.append(error)
        assert engine.generate([PROMPTS[0]], SAMPLED)[0].token_ids
        return errors

    return run(folder, main, "llama", {})


def test_the_run_goes_on_after_bad_requests(
    ranks: RankProcesses,  # noqa: F811
    models: Path,  # noqa: F811
) -> None:
    errors, followed = ranks.run(misuse, models, size=2)
    kinds = [PromptError, InvalidParameterError, *[IncompatibleError] * 3]
    assert [type(error) for error in errors] == kinds
    assert "picklable" in str(errors[1])
    assert followed is None


def test_too_few_processes_without_torchrun() -> None:
    with pytest.raises(RankError, match=r"needs 2 processes, and 1 was started: .*torchrun"):
        check_size(2, None)


def test_an_incomplete_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    with pytest.raises(RankError, match=r"MASTER_ADDR.*torchrun"):
        Launch.of_environment()


@pytest.fixture
def no_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


def test_one_process_needs_no_torchrun(models: Path, no_torchrun: None) -> None:  # noqa: F811
    engine = outrider.load(models / "llama", models / "draft", dtype="float64")
    wanted = tokens(engine)
    assert sharded.run(tokens, models / "llama", models / "draft", dtype="float64") == wanted


def test_ranks_do_not_measure_rounds_ahead(
    models: Path,  # noqa: F811
    no_torchrun: None,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The measurement stops by the clock, so that ranks would run different forward passes."""

    def measured(*arguments: object) -> None:
        raise AssertionError

    monkeypatch.setattr("outrider.engine.loading.measure_round_times", measured)
    settings = {"method": "coupled", "num_speculative_tokens": "auto"}
    assert len(run(models, tokens, "llama", settings)) == len(PROMPTS)


class Interrupts:
    """A logits processor in which Ctrl-C arrives."""

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        raise KeyboardInterrupt


def test_no_round_follows_one_that_was_interrupted(models: Path, no_torchrun: None) -> None:  # noqa: F811
    """The other ranks may be waiting for an exchange of the interrupted forward pass, which the
    next one would be taken for."""

    def main(engine: Engine) -> None:
        with pytest.raises(KeyboardInterrupt):
            engine.generate([PROMPTS[0]], greedy(3, processors=[Interrupts()], stateless=True))
        engine.generate([PROMPTS[0]], greedy(3))

    with pytest.raises(RankLostError, match="interrupted within a round"):
        run(models, main, "llama", {})


class Dismissals:
    """Ranks that note what dismisses them."""

    def __init__(self) -> None:
        self.messages: list[object] = []

    def dismiss(self, message: object) -> None:
        self.messages.append(message)


@pytest.mark.parametrize(
    ("error", "are_dismissed"),
    [
        (None, True),
        (PromptError("x"), True),
        (KeyboardInterrupt(), True),
        (RankLostError("x"), False),
        (RankError("x"), False),
    ],
)
def test_nobody_waits_for_ranks_that_are_lost(
    error: BaseException | None, are_dismissed: bool
) -> None:
    others: Any = Dismissals()
    with suppress(Exception, KeyboardInterrupt), leading(others):
        if error is not None:
            raise error
    assert others.messages == [(END, None)] * are_dismissed


@pytest.mark.parametrize("timeout", [0.0, 1.0, -3.0, float("inf"), float("nan")])
def test_a_time_limit_that_running_ranks_would_exceed(timeout: float) -> None:
    with (
        pytest.raises(InvalidParameterError, match="must be at least 5 seconds"),
        sharded.joined(Launch(0, 1, 0), timeout),
    ):
        pass


def test_a_draft_model_that_fails_on_rank_0_ends_the_run(
    models: Path,  # noqa: F811
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The others wait for its logits, so that another round would be out of step."""

    def fails(*arguments: object) -> None:
        raise OutOfMemoryError("no memory")

    with sharded.joined(Launch(0, 1, 0)) as alone:
        loaded = load_model(models / "draft")
        model = RankZeroModel(alone, loaded.module, loaded.tokenizer, "the draft")
        batch = ForwardBatch(loaded.example_cache(), torch.zeros(1, 1, dtype=torch.int64))
        monkeypatch.setattr(HFModel, "forward", fails)
        with pytest.raises(RankLostError, match="the draft cannot go on: no memory"):
            model.forward(batch)

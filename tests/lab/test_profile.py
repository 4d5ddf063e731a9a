"""Whole profiles of tiny engines: their numbers, and that recording leaves the engine unchanged."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from tiny_models import engine_of, greedy, ragged_prompts, tiny
from tiny_seq2seq import tiny_seq2seq

from outrider import Engine, Sampling
from outrider.core.errors import PromptError
from outrider.engine import running_batch
from outrider.engine.logprobs import Logprobs
from outrider.engine.running_batch import RunningBatch
from outrider.lab.analysis.tokens_per_round import expected_tokens
from outrider.lab.profile import Profile, draw, profile
from outrider.lab.profile.beta import pass_times
from outrider.lab.profile.instrument import recorded, tracks
from outrider.lab.profile.phases import Phases, phase_of
from outrider.lab.profile.spans import SpanRecorder
from outrider.sampling import Warp

(PROMPT,) = ragged_prompts([9])


@pytest.fixture(autouse=True)
def _few_widths(monkeypatch: pytest.MonkeyPatch) -> None:
    short = partial(pass_times, widths=(1, 2, 5, 8), repeats=2)
    monkeypatch.setattr("outrider.lab.profile.model.pass_times", short)


def pair(method: str = "speculative", **settings: Any) -> Engine:
    return engine_of(tiny(seed=0), tiny(seed=1), method, max_batch_size=1, **settings)


def profiled(engine: Engine, sampling: Sampling | None = None, **settings: Any) -> Profile:
    small = {"rounds": 4, "repeats": 2, "memory_bytes": 2**20}
    return profile(engine, PROMPT, sampling or Sampling(seed=3), **(small | settings))


def test_a_profile_of_a_pair(tmp_path: Path) -> None:
    """With chains of four: the numbers are consistent, and the engine is unchanged afterwards."""
    engine = pair()
    models = (engine.target, *tracks(engine).values())
    before = [dict(vars(part)) for part in (*models, RunningBatch, Warp, Logprobs, running_batch)]
    found = profiled(engine)
    after = [dict(vars(part)) for part in (*models, RunningBatch, Warp, Logprobs, running_batch)]
    assert [part.keys() for part in after] == [part.keys() for part in before]
    assert all(a["watch"] is b["watch"] for a, b in zip(after[:3], before[:3], strict=True))
    assert after[3:] == before[3:]
    document = found.document
    run, phases, speed = document["run"], document["phases"], document["speedup"]
    assert (run["rounds"], run["repeats"], run["drafted_per_round"]) == (4, 2, 4)
    assert phases["rounds"] == 8
    assert sum(phases["groups"].values()) == pytest.approx(phases["seconds"])
    assert phases["passes"]["target"]["count"] == 1
    assert phases["passes"]["target"]["tokens"] == 5
    assert phases["passes"]["draft"]["count"] == 4
    assert 1 <= phases["passes"]["draft"]["tokens"] <= 1.25
    assert 0 < phases["outside_passes"] < 1
    assert set(document["models"]) == {"target", "draft"}
    for model in document["models"].values():
        assert list(model["beta"]) == ["1", "2", "5", "8"]
        assert model["beta"]["1"] == 1
        for least in model["floors"].values():
            assert least["reached"] == pytest.approx(least["seconds"] / least["pass"])
    target = document["models"]["target"]
    assert speed["beta"] == pytest.approx(target["beta"]["5"])
    assert speed["draft"] == pytest.approx(4 * speed["c"])
    expected = expected_tokens(run["alpha"], 4)
    assert speed["by_alpha"] == pytest.approx(expected / (speed["draft"] + speed["beta"]))
    assert speed["reached_by_tokens"] == pytest.approx(speed["measured"] / speed["by_tokens"])
    assert {span.track for span in found.spans} == set(found.names)
    assert sum(span.name == "round" for span in found.spans) == 5
    file = tmp_path / "beta.svg"
    about = {"target": "a/b", "draft": "c", "hardware": "H", "threads": 1, "dtype": "float32"}
    pytest.importorskip("matplotlib")
    draw({"about": about, **document}, file)
    assert "The β curve" in file.read_text(encoding="utf-8")


def test_recording_changes_no_token() -> None:
    engine = pair()
    sampling = Sampling(max_new_tokens=20, seed=1, logprobs=2)
    unrecorded = engine.generate([PROMPT], sampling)[0]
    with recorded(engine, SpanRecorder()):
        again = engine.generate([PROMPT], sampling)[0]
    assert again.token_ids == unrecorded.token_ids
    assert again.top_logprobs == unrecorded.top_logprobs


def test_an_error_while_recording_restores_the_engine() -> None:
    engine = pair()
    with pytest.raises(ZeroDivisionError), recorded(engine, SpanRecorder()):
        raise ZeroDivisionError
    assert "score" not in vars(engine.target)
    assert engine.generate([PROMPT], greedy(3))[0].token_ids


@pytest.mark.parametrize(
    ("method", "sampling", "settings"),
    [
        ("speculative", Sampling(temperature=0), {}),
        ("sequoia", Sampling(), {"options": {"topology": "3,2"}}),
        ("staged", Sampling(), {}),
        ("early-exit", Sampling(), {"options": {"layer": 1}}),
        ("mjsd", Sampling(), {}),
        ("suffix", Sampling(), {}),
    ],
)
def test_every_span_of_every_kind_of_method_has_a_phase(
    method: str, sampling: Sampling, settings: dict[str, Any]
) -> None:
    """Trees, rounds inside a draft, a shared KV cache, and no draft model."""
    engine = pair(method, **settings)
    found = profiled(engine, sampling, rounds=2, repeats=1)
    for span in found.spans:
        if span.inside("round") is not None:
            phase_of(span)
    phases = Phases.of(found.spans)
    assert sum(phases.parts.values()) == pytest.approx(phases.seconds)
    assert phases.parts["verify", "rule"] > 0
    document = found.document
    assert (document["speedup"]["by_alpha"] is None) is (method == "sequoia")
    assert set(document["models"]) == {"target"} | ({"draft"} if method != "suffix" else set())


def test_plain_decoding_has_no_speed_up() -> None:
    document = profiled(pair("plain")).document
    assert document["speedup"] is None
    assert document["run"]["plain_tokens_per_second"] is None
    assert list(document["models"]) == ["target"]
    assert document["phases"]["passes"]["target"]["tokens"] == 1


def test_an_encoder_decoder() -> None:
    """The encoder counts neither in a round nor in a floor."""
    engine = engine_of(tiny_seq2seq("t5", 0), tiny_seq2seq("t5", 1), max_batch_size=1)
    document = profiled(engine, rounds=2, repeats=1).document
    floors = document["models"]["target"]["floors"]
    whole = sum(weight.nbytes for weight in engine.target.module.parameters())
    encoder = sum(w.nbytes for w in engine.target.module.get_encoder().block.parameters())
    assert 0 < floors["alone"]["weights"] < whole - encoder
    assert document["phases"]["passes"]["target"]["count"] == 1


def test_a_prompt_that_leaves_no_room_for_two_rounds() -> None:
    (long,) = ragged_prompts([127])
    with pytest.raises(PromptError, match="no room for two rounds: shorten the prompt"):
        profile(pair(), long, Sampling(), rounds=2, repeats=1, memory_bytes=2**20)


def test_a_full_context_ends_the_rounds() -> None:
    (long,) = ragged_prompts([118])
    found = profile(pair(), long, Sampling(), rounds=100, repeats=1, memory_bytes=2**20)
    assert 1 <= found.document["run"]["rounds"] < 10
    assert found.document["run"]["tokens"] < 10

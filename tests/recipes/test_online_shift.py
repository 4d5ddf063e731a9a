"""The recipe of the shifted stream: what its table says, and that it goes on where it stopped."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from tiny_models import byte_tokenizer, tiny_module

from recipes import online_shift

ARMS = ("frozen", "online", "oracle")


def arm(*alphas: float) -> list[dict[str, float]]:
    return [{"alpha": alpha, "tokens": 100.0} for alpha in alphas]


def test_the_table_says_how_much_of_the_gap_is_closed_and_when(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(online_shift, "BURSTS_BEFORE", 2)
    monkeypatch.setattr(online_shift, "SMOOTHING", 1)
    arms = {
        "frozen": arm(0.7, 0.7, 0.4, 0.4, 0.4, 0.4),
        "online": arm(0.7, 0.7, 0.4, 0.44, 0.5, 0.55),
        "oracle": arm(0.7, 0.7, 0.6, 0.6, 0.6, 0.6),
    }
    table = online_shift.summary(arms)
    assert table["frozen"]["before"] == pytest.approx(0.7)
    assert table["online"]["at the end"] == pytest.approx(0.525)
    assert table["gap"] == pytest.approx(0.2)
    assert table["recovered"] == pytest.approx(0.625)
    assert table["tokens to half"] == 300
    assert table["tokens"] == 400


def test_half_of_the_gap_may_never_be_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(online_shift, "BURSTS_BEFORE", 1)
    arms = {
        name: arm(0.7, *[alpha] * 8) for name, alpha in zip(ARMS, (0.4, 0.45, 0.6), strict=True)
    }
    table = online_shift.summary(arms)
    assert table["recovered"] == pytest.approx(0.25)
    assert table["tokens to half"] is None


def test_an_interrupted_run_goes_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The arms of a tiny pair; of the second run only the bursts that are missing are generated."""
    sizes = {
        "PROMPT_TOKENS": 8,
        "NEW_TOKENS": 8,
        "BURST": 2,
        "BURSTS_BEFORE": 1,
        "SETTINGS": replace(online_shift.SETTINGS, trial_rounds=0, publish_every=1),
    }
    for name, value in sizes.items():
        monkeypatch.setattr(online_shift, name, value)
    for role, seed in (("target", 0), ("draft", 1)):
        module = tiny_module("llama", seed, vocab_size=280)
        module.save_pretrained(tmp_path / role)
        byte_tokenizer().save_pretrained(tmp_path / role)

    def engine() -> online_shift.Engine:
        return online_shift.load(
            tmp_path / "target", tmp_path / "draft", num_speculative_tokens=3, dtype="float32"
        )

    text = "def f(x):\n    return x + 1\n" * 20
    bursts = online_shift.bursts_of(online_shift.prompts_of(engine(), text, 8, 0))
    with pytest.MonkeyPatch.context() as patch:
        calls = []

        def stops(*arguments: object, **settings: object) -> object:
            calls.append(arguments)
            if len(calls) == 3:
                raise KeyboardInterrupt
            return generate(*arguments, **settings)

        generate = online_shift.Engine.generate
        patch.setattr(online_shift.Engine, "generate", stops)
        with pytest.raises(KeyboardInterrupt):
            online_shift.run_arm(engine(), "online", bursts, tmp_path)
    record = tmp_path / "online.jsonl"
    first = record.read_text()
    assert len(first.splitlines()) == 2
    arms = {name: online_shift.run_arm(engine(), name, bursts, tmp_path) for name in ARMS}
    assert record.read_text().startswith(first)
    assert [len(entries) for entries in arms.values()] == [4, 4, 4]
    assert arms["online"][-1]["step"] > arms["online"][1]["step"]
    assert arms["frozen"] == arms["oracle"]
    pytest.importorskip("matplotlib")
    online_shift.draw(arms, tmp_path / "alpha.png")
    assert (tmp_path / "alpha.png").stat().st_size > 1000
    assert json.loads(json.dumps(online_shift.summary(arms)))["frozen"]["before"] > 0

"""Where outputs end, what is streamed before, and that statistics count the kept tokens only."""

import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from tiny_models import (
    ForcedTokens,
    byte_tokenizer,
    engine_of,
    greedy,
    ragged_prompts,
    tiny,
    tiny_module,
    token_ids,
    uniform_method,
)
from transformers import PreTrainedTokenizerBase

from outrider import Engine, Event, Result, Sampling, Stats
from outrider.engine.round_counts import RoundCounts
from outrider.runtime import HFModel, KVCache

TEXT = "def f(x):\n    return x + 1 # hello world, 😀 é 漢字 👩‍👩‍👧 and hello again\n"
PROMPT = "print("
ROUNDS = [0, 1, 3, 8]
"""γ; 0 is plain decoding."""


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def target(tokenizer: PreTrainedTokenizerBase) -> HFModel:
    module = tiny_module(vocab_size=len(tokenizer), num_hidden_layers=1)
    return HFModel(module, tokenizer, "target")


def engine_with(target: HFModel, γ: int, **settings: Any) -> Engine:
    return engine_of(target, HFModel(target.module) if γ else None, γ=γ or 1, **settings)


def forced(target: HFModel, text: str = TEXT, **settings: Any) -> tuple[Sampling, list[int]]:
    """Parameters that force the model to generate this text, and its tokens."""
    assert target.tokenizer is not None
    ids = target.tokenizer(text)["input_ids"]
    prompt = target.tokenizer(PROMPT)["input_ids"]
    settings = {"max_new_tokens": len(ids), "ignore_eos": True} | settings
    sampling = Sampling(temperature=0, processors=[ForcedTokens(prompt, ids)], **settings)
    return sampling, ids


def check_stats(result: Result, num_events: int | None = None) -> None:
    """Checks that the statistics agree with each other and with the output."""
    stats = result.stats
    assert stats.emitted == len(result.token_ids) == len(result.origins)
    assert stats.accepted == result.origins.count("accepted") <= stats.emitted
    assert stats.accepted <= stats.drafted
    assert stats.emitted - stats.accepted <= stats.rounds
    assert sum(stats.accepted_at) == stats.accepted
    assert sum(stats.tried_at) == stats.verified
    assert stats.accepted <= stats.verified <= stats.drafted
    assert 0 <= stats.overlap <= stats.verified + 1e-9
    assert all(a <= t for a, t in zip(stats.accepted_at, stats.tried_at, strict=True))
    assert all(0 <= share <= 1 for share in stats.acceptance_by_position)
    assert stats.tried_at == sorted(stats.tried_at, reverse=True)
    assert stats.acceptance_length == pytest.approx(stats.emitted / stats.rounds)
    if num_events is not None:
        assert stats.rounds == num_events


@pytest.mark.parametrize("γ", ROUNDS)
def test_the_whole_text_is_generated(target: HFModel, γ: int) -> None:
    sampling, ids = forced(target)
    result = engine_with(target, γ).generate(PROMPT, sampling)
    assert result.text == TEXT
    assert result.token_ids == tuple(ids)
    assert result.finish_reason == "length"
    check_stats(result)


@pytest.mark.parametrize("γ", ROUNDS)
@pytest.mark.parametrize(
    "stop",
    [
        " ",
        "x",
        "return",
        "x + 1",
        "\n",
        "hello w",
        "llo world, ",
        "😀",
        "😀 é",
        "字 👩",
        "👩‍👩‍👧 and",
    ],
)
def test_stop_strings_cut_exactly(target: HFModel, γ: int, stop: str) -> None:
    """Inside tokens, across tokens, and across rounds.

    The last kept token is the one that completed the stop string.
    """
    sampling, ids = forced(target, stop=stop)
    result = engine_with(target, γ).generate(PROMPT, sampling)
    assert result.text == TEXT[: TEXT.index(stop)]
    assert result.finish_reason == "stop"
    assert target.tokenizer is not None
    assert result.token_ids == tuple(ids[: len(result.token_ids)])
    assert stop in target.tokenizer.decode(result.token_ids)
    assert stop not in target.tokenizer.decode(result.token_ids[:-1])
    check_stats(result)


def test_stop_strings_token_by_token(target: HFModel) -> None:
    """The same if every round emits one token, because all drafts are rejected."""
    engine = engine_of(target, None, uniform_method(), γ=3)
    for stop in ("hello w", "😀 é", "\n    return"):
        result = engine.generate(PROMPT, forced(target, stop=stop)[0])
        assert (result.text, result.finish_reason) == (TEXT[: TEXT.index(stop)], "stop")


@pytest.mark.parametrize("γ", [0, 3, 8])
def test_the_first_of_several_stops_ends_the_text(target: HFModel, γ: int) -> None:
    """The one completed first; if one token completes several, the one that began first."""
    engine = engine_with(target, γ)
    for stops, first in (
        (["never", "again", "hello"], "hello"),
        (["return x +", "turn x"], "turn x"),
        (["😀", "😀 é"], "😀"),
        (["ello", "hell"], "hell"),
    ):
        result = engine.generate(PROMPT, forced(target, stop=stops)[0])
        assert (result.text, result.finish_reason) == (TEXT[: TEXT.index(first)], "stop")


@pytest.mark.parametrize("γ", [0, 3, 8])
def test_a_partial_stop_string_does_not_end_the_text(target: HFModel, γ: int) -> None:
    """A text that ends inside a possible stop string is kept in full."""
    for text, stop in (("a b", "b c"), ("hello", "hello!"), ("xxxy", "xxxx")):
        sampling, _ = forced(target, text, stop=stop)
        result = engine_with(target, γ).generate(PROMPT, sampling)
        assert (result.text, result.finish_reason) == (text, "length")


@pytest.mark.parametrize("γ", ROUNDS)
def test_stop_token_ids_are_kept(target: HFModel, γ: int) -> None:
    _, ids = forced(target)
    for place in (0, 1, 7, 12):
        wanted = ids.index(ids[place]) + 1
        stopped, _ = forced(target, stop=[ids[place]])
        result = engine_with(target, γ).generate(PROMPT, stopped)
        assert (result.token_ids, result.finish_reason) == (tuple(ids[:wanted]), "stop")
        check_stats(result)


@pytest.mark.parametrize("γ", ROUNDS)
def test_end_of_sequence(target: HFModel, γ: int) -> None:
    """It is kept as a token but not as text. Tokens after it are dropped, also from statistics."""
    engine = engine_with(target, γ)
    eos = 0
    engine.eos_ids = frozenset({eos})
    assert target.tokenizer is not None
    before, after = (target.tokenizer(text)["input_ids"] for text in ("hello", " world"))
    prompt = target.tokenizer(PROMPT)["input_ids"]
    script = [*before, eos, *after]
    settings: dict[str, Any] = {
        "temperature": 0,
        "max_new_tokens": len(script),
        "processors": [ForcedTokens(prompt, script)],
    }
    result = engine.generate(PROMPT, Sampling(**settings))
    assert (result.text, result.finish_reason) == ("hello", "eos")
    assert result.token_ids == (*before, eos)
    check_stats(result)
    result = engine.generate(PROMPT, Sampling(ignore_eos=True, **settings))
    assert (result.text, result.finish_reason) == ("hello world", "length")
    assert result.token_ids == tuple(script)


def test_end_of_sequence_comes_from_the_model_or_its_tokenizer() -> None:
    tokenizer = byte_tokenizer()
    module = tiny_module(vocab_size=len(tokenizer))
    assert engine_of(HFModel(module)).eos_ids == frozenset()
    assert engine_of(HFModel(module, tokenizer)).eos_ids == {0}
    module.generation_config.eos_token_id = [3, 5]
    assert engine_of(HFModel(module, tokenizer)).eos_ids == {3, 5}
    module.generation_config.eos_token_id = 4
    assert engine_of(HFModel(module)).eos_ids == {4}


@pytest.mark.parametrize("γ", ROUNDS)
@pytest.mark.parametrize("num", [1, 2, 7])
def test_length(target: HFModel, γ: int, num: int) -> None:
    """Drafts are no longer than what can still be emitted."""
    sampling, ids = forced(target, max_new_tokens=num)
    result = engine_with(target, γ).generate(PROMPT, sampling)
    assert (result.token_ids, result.finish_reason) == (tuple(ids[:num]), "length")
    assert result.stats.drafted < num
    check_stats(result)


@pytest.mark.parametrize("γ", ROUNDS)
@pytest.mark.parametrize("stop", [(), "hello again", "字 👩", "llo"])
def test_streamed_pieces_add_up_to_the_text_and_split_no_character(
    target: HFModel, γ: int, stop: str | tuple[()]
) -> None:
    sampling, _ = forced(target, stop=stop)
    engine = engine_with(target, γ)
    result = engine.generate(PROMPT, sampling)
    events = list(engine.stream(PROMPT, sampling))
    assert "".join(event.text for event in events) == result.text
    assert not any("\ufffd" in event.text for event in events)
    assert tuple(t for event in events for t in event.token_ids) == result.token_ids
    assert tuple(o for event in events for o in event.origins) == result.origins
    assert [e.finish_reason for e in events] == [None] * (len(events) - 1) + [result.finish_reason]
    assert all(len(e.logprobs) == len(e.token_ids) for e in events)
    check_stats(result, len(events))


@pytest.mark.parametrize("γ", [0, 1, 4])
def test_a_possible_stop_string_is_held_back(target: HFModel, γ: int) -> None:
    """No character is ever streamed that the final text does not have."""
    for text, stop in (("say hellhello", "hello"), ("a\n\n\nb", "\n\nb"), ("ababac", "abac")):
        sampling, _ = forced(target, text, stop=stop)
        shown = ""
        for event in engine_with(target, γ).stream(PROMPT, sampling):
            shown += event.text
            assert text[: text.index(stop)].startswith(shown)
        assert shown == text[: text.index(stop)]


def test_pieces_are_streamed_as_soon_as_they_are_final(target: HFModel) -> None:
    sampling, ids = forced(target, "hello world")
    events = list(engine_with(target, 0).stream(PROMPT, sampling))
    assert len(events) == len(ids)
    assert all(event.text for event in events)


def test_a_text_cut_within_a_character(target: HFModel) -> None:
    """The length limit ends inside an emoji, which becomes one replacement character."""
    assert target.tokenizer is not None
    whole = target.tokenizer("é 😀")["input_ids"]
    sampling, _ = forced(target, "é 😀", max_new_tokens=len(whole) - 1)
    for γ in (0, 3):
        engine = engine_with(target, γ)
        result = engine.generate(PROMPT, sampling)
        assert result.text == target.tokenizer.decode(result.token_ids) == "é \ufffd"
        events = list(engine.stream(PROMPT, sampling))
        assert "".join(e.text for e in events) == result.text
        assert not any("\ufffd" in e.text for e in events[:-1])


def test_text_is_the_decoding_of_random_tokens(target: HFModel) -> None:
    """Random bytes are mostly no valid characters, so only whole texts are compared."""
    assert target.tokenizer is not None
    sampling = Sampling(max_new_tokens=40, ignore_eos=True)
    for prompt in ("a", "é", "hello 漢"):
        result = engine_with(target, 3).generate(prompt, sampling)
        assert result.text == target.tokenizer.decode(result.token_ids, skip_special_tokens=True)


@pytest.mark.parametrize("γ", [1, 2, 5])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_origins_add_up(target: HFModel, γ: int, temperature: float) -> None:
    """Every round emits its accepted tokens and then one token of the target."""
    draft = tiny("llama", 0, vocab_size=target.num_tokens, num_hidden_layers=1, std=0.15)
    engine = engine_of(target, draft, γ=γ)
    sampling = Sampling(temperature=temperature, max_new_tokens=33, ignore_eos=True)
    events = list(engine.stream([1, 2, 3], sampling))
    kinds = set()
    for event in events:
        *accepted, last = event.origins
        assert set(accepted) <= {"accepted"}
        kinds.add(last)
        if last == "bonus":
            assert len(accepted) == γ or event is events[-1] or event is events[-2]
        if last == "correction":
            assert len(accepted) < γ
    assert "correction" in kinds
    plain = engine_with(target, 0).generate([[1, 2, 3]], sampling)[0]
    assert set(plain.origins) == {"plain"}
    assert plain.stats.drafted == plain.stats.accepted == plain.stats.verified == 0
    assert plain.stats.acceptance_length == 1
    batch = engine.generate(ragged_prompts([3, 8, 5]), sampling)
    for result in batch:
        check_stats(result)
    total = batch.stats
    assert total.emitted == 99
    assert total.accepted == sum(r.stats.accepted for r in batch)
    assert sum(total.accepted_at) == total.accepted
    assert Stats.total([]).acceptance_length == 0


@pytest.mark.parametrize("kept", [1, 2])
def test_a_draft_counts_up_to_the_end_of_the_output(kept: int) -> None:
    """Also where the end, such as a stop string, is the last accepted token."""
    stats = Stats()
    stats.count(RoundCounts(5, 4, True, [1.0, 0.5, 0.2], [0.5, 0.2, 0.1]), 2, kept)
    assert (stats.drafted, stats.accepted, stats.verified, stats.emitted) == (kept,) * 4
    assert stats.tried_at == stats.accepted_at == [1] * kept
    assert stats.reached == sum([1.0, 0.5][:kept])


def test_seconds_are_all_accounted_for(target: HFModel) -> None:
    stats = engine_with(target, 3).generate(PROMPT, forced(target)[0]).stats
    parts = (stats.draft_seconds, stats.target_seconds, stats.other_seconds)
    assert min(parts) > 0
    assert stats.seconds == pytest.approx(sum(parts))
    assert stats.as_dict()["tokens_per_second"] == pytest.approx(stats.emitted / sum(parts))


class Interrupting:
    """A processor that raises an error in its n-th call."""

    def __init__(self, calls: int, error: type[BaseException]) -> None:
        self.calls, self.error = calls, error

    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
        self.calls -= 1
        if self.calls < 0:
            raise self.error
        return scores


def live_caches() -> int:
    gc.collect()
    return sum(type(thing) is KVCache for thing in gc.get_objects())


@pytest.mark.parametrize("γ", [0, 4])
def test_closing_a_stream_frees_its_row(target: HFModel, γ: int) -> None:
    engine = engine_with(target, γ)
    before = engine.generate(PROMPT, greedy(20))
    assert live_caches() == 0
    stream = engine.stream(PROMPT, greedy(20))
    assert isinstance(stream, Iterator)
    first = next(stream)
    assert isinstance(first, Event)
    assert live_caches() > 0
    stream.close()  # type: ignore[attr-defined]
    assert live_caches() == 0
    assert engine.generate(PROMPT, greedy(20)).token_ids == before.token_ids


@pytest.mark.parametrize("γ", [0, 4])
@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError])
@pytest.mark.parametrize("calls", [1, 2, 7, 18])
def test_an_exception_in_the_middle_leaves_the_engine_usable(
    target: HFModel, γ: int, error: type[BaseException], calls: int
) -> None:
    """In a draft pass or during verification, with other batch sizes before and after."""
    engine = engine_with(target, γ)
    prompts = ragged_prompts([4, 9, 2])
    wanted = engine.generate(prompts, greedy(15))
    broken = greedy(15, processors=[Interrupting(calls, error)], stateless=True)
    with pytest.raises(error):
        engine.generate(prompts[:2], broken)
    with pytest.raises(error):
        list(engine.stream(PROMPT, broken))
    assert live_caches() == 0
    assert token_ids(engine.generate(prompts, greedy(15))) == token_ids(wanted)


def test_two_streams_at_the_same_time(target: HFModel) -> None:
    """Rows of different streams of one engine do not affect each other."""
    engine = engine_with(target, 3)
    sampling = Sampling(max_new_tokens=20, ignore_eos=True)
    prompts = ragged_prompts([4, 9])
    wanted = [engine.generate([p], sampling)[0].token_ids for p in prompts]
    first, second = (engine.stream(p, sampling) for p in prompts)
    texts: list[list[int]] = [[], []]
    for pair in zip(first, second, strict=False):
        for ids, event in zip(texts, pair, strict=True):
            ids.extend(event.token_ids)
    texts[0].extend(t for event in first for t in event.token_ids)
    texts[1].extend(t for event in second for t in event.token_ids)
    for ids, whole in zip(texts, wanted, strict=True):
        assert tuple(ids) == whole[: len(ids)]
        assert len(ids) > 10

"""What is collected of rounds: the target's distributions at verified positions, and nothing else.

Legend: K top tokens, P positions, V vocabulary.
"""

from dataclasses import dataclass

import pytest
import torch
from online_helpers import Watching, pair, sampled
from tiny_models import VOCAB, engine_of, full_logits, greedy, ragged_prompts, tiny, token_ids

from outrider import Engine, Sampling
from outrider.engine import running_batch
from outrider.train.online.collector import Collector, RateLimit, TopKRecorder
from outrider.train.online.samples import Sample

K = 7


@dataclass
class Collecting(Watching):
    """An observer that only collects."""

    collector: Collector[Sample] | None = None

    def observe(self, round_, rows):  # type: ignore[no-untyped-def]
        assert self.collector is not None
        self.blocks = self.collector.blocks(round_, rows)
        return super().observe(round_, rows)

    def read(self, done, line) -> None:  # type: ignore[no-untyped-def]
        super().read(done, line)
        assert self.collector is not None
        self.collector.read(done, line)


def collecting(
    engine: Engine,
    *,
    rate: float = 1e6,
    span: int = 16,
    context: int = 128,
    num_tokens: int = VOCAB,
) -> tuple[Collecting, list[Sample]]:
    samples: list[Sample] = []
    limit = RateLimit(rate, lambda: 0.0)
    recorder = TopKRecorder(K, num_tokens)
    observer = Collecting(collector=Collector(recorder, samples.append, limit, span, context))
    engine.observed.observer = observer
    return observer, samples


@pytest.mark.parametrize("method", ["speculative", "block", "coupled", "specinfer", "sequoia"])
@pytest.mark.parametrize("sampling", [sampled(24), greedy(24)], ids=["sampled", "greedy"])
def test_a_sample_holds_the_targets_distributions_behind_its_tokens(
    method: str, sampling: Sampling
) -> None:
    """Chains and trees alike. The distributions are compared with those of a forward pass over the
    sample's own tokens, so one that belongs to a neighbouring position fails."""
    target, draft = pair()
    engine = engine_of(target, draft, method)
    _, samples = collecting(engine)
    outputs = engine.generate(ragged_prompts([9, 4, 1]), sampling)
    sequences = [(*result.prompt_ids, *result.token_ids) for result in outputs]
    assert len(samples) > 3
    for sample in samples:
        tokens = tuple(sample.tokens_T.tolist())
        assert any(tokens == sequence[: len(tokens)] for sequence in sequences)
        wanted_TV = full_logits(target.module, tokens).log_softmax(-1)
        top = wanted_TV[sample.positions_P].topk(K)
        torch.testing.assert_close(sample.log_p_PK, top.values, atol=1e-4, rtol=1e-4)
        assert torch.equal(sample.ids_PK.long(), top.indices)
        shifted = wanted_TV[(sample.positions_P - 1).clamp(min=0)].topk(K).values
        assert not torch.allclose(sample.log_p_PK, shifted, atol=1e-2), "it must be able to fail"


def test_positions_are_those_of_accepted_tokens_and_of_the_first_rejected_one() -> None:
    """Neither bonus tokens nor what lies behind a rejected one; counted from the rows' origins."""
    target, draft = pair()
    engine = engine_of(target, draft, γ=2)
    observer, samples = collecting(engine)
    result = engine.generate([[5, 6, 7]], sampled(100))[0]
    first = len(result.prompt_ids)
    verified = [
        first - 1 + index
        for index, origin in enumerate(result.origins)
        if origin in ("accepted", "correction")
    ]
    assert {"accepted", "correction", "bonus"} <= set(result.origins)
    found = []
    for sample in samples:
        assert (
            sample.tokens_T.tolist()
            == [*result.prompt_ids, *result.token_ids][: len(sample.tokens_T)]
        )
        found += sample.positions_P.tolist()
    assert found == verified
    assert sum(done.num_verified for done in observer.done) == len(verified)


def test_a_draft_that_is_always_accepted_is_never_rejected() -> None:
    target = tiny()
    engine = engine_of(target, target.with_own_weights(), γ=3)
    observer, samples = collecting(engine)
    result = engine.generate([[5, 6, 7]], greedy(40))[0]
    assert result.stats.acceptance_rate == 1
    assert not any(done.counts.rejected for done in observer.done)
    num_positions = sum(len(sample.positions_P) for sample in samples)
    assert num_positions == sum(origin == "accepted" for origin in result.origins)


def test_nothing_behind_the_end_of_an_output_is_collected() -> None:
    target, draft = pair()
    engine = engine_of(target, draft, γ=4)
    free = engine.generate([[5, 6, 7]], sampled(40))[0].token_ids
    stop = free[5]
    _, samples = collecting(engine)
    sampling = Sampling(temperature=1, max_new_tokens=40, ignore_eos=True, stop=(stop,))
    result = engine.generate([[5, 6, 7]], sampling)[0]
    assert len(result.token_ids) <= 6
    last = max(int(sample.positions_P.max()) for sample in samples)
    assert last <= 3 + len(result.token_ids) - 2, "the last distribution is that of the last token"


def test_long_outputs_are_cut_into_stretches_with_some_context() -> None:
    target, draft = pair()
    engine = engine_of(target, draft)
    _, samples = collecting(engine, span=8, context=5)
    result = engine.generate([list(range(30))], sampled(60))[0]
    sequence = [*result.prompt_ids, *result.token_ids]
    assert len(samples) >= 5
    for sample in samples:
        assert int(sample.positions_P[0]) == 5
        assert 1 <= len(sample.positions_P) < 8 + 5
        assert int(sample.positions_P[-1]) == len(sample.tokens_T) - 1
        text = sample.tokens_T.tolist()
        assert any(sequence[i : i + len(text)] == text for i in range(len(sequence)))


def test_a_smaller_vocabulary_divides_the_probability_among_its_tokens() -> None:
    target, draft = pair()
    engine = engine_of(target, draft)
    _, samples = collecting(engine, num_tokens=50)
    engine.generate(ragged_prompts([9]), sampled(24))
    sample = samples[0]
    logits_PV = full_logits(target.module, sample.tokens_T.tolist())[sample.positions_P]
    top = logits_PV[:, :50].log_softmax(-1).topk(K)
    torch.testing.assert_close(sample.log_p_PK, top.values, atol=1e-4, rtol=1e-4)
    assert int(sample.ids_PK.max()) < 50


def test_a_rate_bounds_what_is_collected_by_leaving_out_rows() -> None:
    """A rate of 2 per second allows a burst of 20: rows are recorded from their beginning until the
    burst is used up, and then none."""
    target, draft = pair()
    engine = engine_of(target, draft, max_batch_size=1)
    observer, samples = collecting(engine, rate=2.0)
    engine.generate(ragged_prompts([9] * 6), sampled(16))
    num_positions = sum(len(sample.positions_P) for sample in samples)
    most = max(done.num_verified for done in observer.done) * 16
    assert 20 <= num_positions <= 20 + most
    assert num_positions < sum(done.num_verified for done in observer.done) / 2


def test_a_rate_recovers_with_time() -> None:
    now = [0.0]
    limit = RateLimit(2.0, lambda: now[0])
    limit.spend(30)
    assert not limit.admits()
    now[0] = 4.9
    assert not limit.admits()
    now[0] = 5.1
    assert limit.admits()
    now[0] = 1e6
    assert limit.admits()
    limit.spend(20)
    assert not limit.admits(), "an idle night does not save up more than the burst"


def test_rows_that_are_not_recorded_run_beside_those_that_are() -> None:
    """Two requests are recorded; the ones that join later are not. All outputs are those of an
    engine that nobody watches."""
    target, draft = pair()
    prompts = ragged_prompts([9, 4, 7, 2])
    wanted = token_ids(engine_of(target, draft).generate(prompts, sampled(40)))
    engine = engine_of(target, draft, max_batch_size=2)
    _, samples = collecting(engine, rate=4.0)
    assert token_ids(engine.generate(prompts, sampled(40))) == wanted
    firsts = {tuple(sample.tokens_T.tolist()[:2]) for sample in samples}
    assert len(firsts) == 2


def test_watching_adds_no_copy_to_a_round(monkeypatch: pytest.MonkeyPatch) -> None:
    """One call of ``copy_to_host`` per round, watched or not; its other numbers are the same."""
    calls: list[int] = []
    copy = running_batch.copy_to_host

    def counting(blocks):  # type: ignore[no-untyped-def]
        calls.append(len(blocks))
        return copy(blocks)

    monkeypatch.setattr(running_batch, "copy_to_host", counting)
    target, draft = pair()
    engine = engine_of(target, draft)
    unwatched = engine.generate([[5, 6, 7]], sampled(24))[0]
    unwatched_calls = list(calls)
    calls.clear()
    observer, _ = collecting(engine)
    watched = engine.generate([[5, 6, 7]], sampled(24))[0]
    assert watched.token_ids == unwatched.token_ids
    assert len(calls) == len(observer.rounds)
    drafted = [round_.draft.num_nodes > 1 for round_ in observer.rounds]
    more = [2 * drafts for drafts in drafted]  # probabilities and ids of the top tokens
    assert calls == [n + m for n, m in zip(unwatched_calls, more, strict=True)]


def test_log_probabilities_are_read_beside_what_is_collected() -> None:
    target, draft = pair()
    sampling = Sampling(temperature=1, max_new_tokens=24, ignore_eos=True, logprobs=3)
    wanted = engine_of(target, draft).generate([[5, 6, 7]], sampling)[0]
    engine = engine_of(target, draft)
    collecting(engine)
    found = engine.generate([[5, 6, 7]], sampling)[0]
    assert found.logprobs == wanted.logprobs
    assert found.top_logprobs == wanted.top_logprobs

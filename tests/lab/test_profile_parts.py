"""The parts of a profile on toy spans and tiny models: spans, phases, floors, formula, trace."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from tiny_models import ragged_prompts, tiny, tiny_module
from tiny_seq2seq import tiny_seq2seq, tiny_seq2seq_module
from torch.testing._internal.two_tensor import TwoTensor

from outrider.lab.analysis.tokens_per_round import expected_tokens
from outrider.lab.profile import trace_events, write_trace
from outrider.lab.profile.bandwidth import last_level_cache, read_bandwidth
from outrider.lab.profile.beta import context_of, pass_times
from outrider.lab.profile.floor import Floor, cache_bytes, stored_bytes, weight_bytes
from outrider.lab.profile.formula import SpeedUp
from outrider.lab.profile.phases import PHASES, Phases
from outrider.lab.profile.spans import SpanRecorder, span_cost


def ticking() -> Iterator[float]:
    """A clock that reads 0, 1, 3, 6, 10, … so that no two spans are equally long."""
    now, step = 0.0, 0
    while True:
        now += step
        step += 1
        yield now


def recorder() -> SpanRecorder:
    return SpanRecorder(clock=ticking().__next__)


def call(
    spans: SpanRecorder, name: str, track: str = "engine", *inner: tuple, **detail: object
) -> None:
    """Records a span with others inside it."""
    spans.begin(name, track)
    for each in inner:
        call(spans, *each)
    spans.end()


def one_round(spans: SpanRecorder) -> None:
    """Records the spans of a round whose drafter applies a verification rule itself."""
    spans.begin("round", "engine")
    spans.begin("propose", "engine")
    spans.begin("extend", "draft", {"tokens": 2, "context": 7})
    call(spans, "pass", "draft")
    spans.end()
    call(spans, "distribution")
    call(spans, "rule")
    spans.end()
    spans.begin("score", "target", {"nodes": 3, "chain": True})
    spans.begin("extend", "target", {"tokens": 3, "context": 9})
    call(spans, "pass", "target")
    spans.end()
    spans.end()
    call(spans, "distribution", "engine", ("distribution",))
    for name in ("rule", "commit", "draft commit", "append", "logprobs", "divergence"):
        call(spans, name, "target" if name == "commit" else "engine")
    call(spans, "device-to-host sync", "engine", ("take tokens",))
    spans.end()


def test_own_times_add_up_to_the_outermost_span() -> None:
    spans = recorder()
    call(spans, "a", "engine", ("b", "engine", ("c",), ("d",)), ("e",))
    (whole,) = [span for span in spans.spans if span.outer is None]
    assert sum(span.own for span in spans.spans) == whole.seconds
    assert [span.name for span in spans.spans] == ["c", "d", "b", "e", "a"]
    assert all(span.own > 0 for span in spans.spans)


def test_phases_add_up_to_the_round() -> None:
    """Spans inside ``propose`` count as draft; prefill is not part of a round."""
    spans = recorder()
    call(spans, "prefill", "engine", ("extend", "target", ("pass", "target")))
    for _ in range(3):
        one_round(spans)
    phases = Phases.of(spans.spans)
    rounds = [span for span in spans.spans if span.name == "round"]
    assert phases.num_rounds == 3
    assert phases.seconds == pytest.approx(sum(span.seconds for span in rounds) / 3)
    assert sum(phases.parts.values()) == pytest.approx(phases.seconds)
    assert set(phases.parts) == set(PHASES)
    assert min(phases.parts.values()) > 0
    groups = ["draft", "target", "verify", "cache", "Python"]
    assert sum(map(phases.group, groups)) == pytest.approx(phases.seconds)
    proposals = [span for span in spans.spans if span.name == "propose"]
    assert phases.group("draft") == pytest.approx(sum(span.seconds for span in proposals) / 3)
    passes = {span.track: span.seconds for span in spans.spans if span.name == "pass"}
    assert phases.passes["target"].seconds > 0
    assert set(phases.passes) == set(passes)
    assert (phases.passes["draft"].tokens, phases.passes["draft"].context) == (2, 7)
    assert phases.passes["target"].count == 1
    outside = phases.seconds - phases.parts["draft", "passes"] - phases.parts["target", "pass"]
    assert phases.outside == pytest.approx(outside)
    assert phases.chain
    found = phases.as_dict()
    assert sum(row["seconds"] for row in found["phases"]) == pytest.approx(found["seconds"])
    assert sum(found["groups"].values()) == pytest.approx(found["seconds"])


def test_a_recorder_waits_at_both_ends() -> None:
    waited: list[int] = []
    spans = SpanRecorder(clock=ticking().__next__, wait=lambda: waited.append(1))
    call(spans, "a", "engine", ("b",))
    assert len(waited) == 4
    assert span_cost() > 0


def test_the_trace_has_chromes_format(tmp_path: Path) -> None:
    """Nested complete events in microseconds, and a name for every track."""
    spans = recorder()
    one_round(spans)
    names = {"engine": "the engine", "target": "target: Llama", "draft": "draft: Llama"}
    file = tmp_path / "trace.json"
    write_trace(spans.spans, names, file)
    document = json.loads(file.read_text(encoding="utf-8"))
    assert document == trace_events(spans.spans, names)
    assert set(document) == {"displayTimeUnit", "traceEvents"}
    events = document["traceEvents"]
    complete = [event for event in events if event["ph"] == "X"]
    named = {
        e["tid"]: e["args"]["name"] for e in events if (e["ph"], e["name"]) == ("M", "thread_name")
    }
    assert {event["ph"] for event in events} == {"X", "M"}
    assert list(named.values()) == list(names.values())
    assert len(complete) == len(spans.spans)
    assert min(event["ts"] for event in complete) == 0
    for event in complete:
        assert set(event) == {"name", "cat", "ph", "ts", "dur", "pid", "tid", "args"}
        assert isinstance(event["name"], str)
        assert event["tid"] in named
        assert event["pid"] == complete[0]["pid"]
    whole = next(event for event in complete if event["name"] == "round")
    assert whole["dur"] == pytest.approx(1e6 * spans.spans[-1].seconds)
    for a in complete:
        for b in complete:
            if a["tid"] == b["tid"] and a["ts"] < b["ts"] < a["ts"] + a["dur"]:
                assert b["ts"] + b["dur"] <= a["ts"] + a["dur"]
    assert trace_events([], names)["traceEvents"]


def num_bytes(module: torch.nn.Module) -> int:
    return sum(weight.nbytes for weight in module.parameters())


def test_weights_of_untied_and_tied_models() -> None:
    """Of an embedding table, only rows are read; a head, or a table tied to it, is read in full."""
    untied, tied = tiny_module(), tiny_module(tie_word_embeddings=True)
    table = untied.get_input_embeddings().weight
    rest = sum(buffer.nbytes for buffer in untied.buffers())
    row = table.nbytes // table.shape[0]
    assert weight_bytes(untied) == num_bytes(untied) - table.nbytes + row + rest
    assert weight_bytes(untied, 5) == weight_bytes(untied) + 4 * row
    assert weight_bytes(untied, 10**6) == num_bytes(untied) + rest
    assert weight_bytes(tied) == num_bytes(tied) + rest == weight_bytes(untied) - row
    assert weight_bytes(tied, 5) == weight_bytes(tied)
    half = tiny_module().to(torch.bfloat16)
    assert weight_bytes(half) == pytest.approx(weight_bytes(untied) / 2, rel=1e-3)


def test_weights_without_skipped_layers_and_with_learned_positions() -> None:
    module = tiny_module("gpt2")
    (table, positions) = (module.transformer.wte.weight, module.transformer.wpe.weight)
    rows = (table.nbytes // table.shape[0], positions.nbytes // positions.shape[0])
    whole = num_bytes(module) - table.nbytes - positions.nbytes + sum(rows)
    assert weight_bytes(module) == whole
    layer = module.transformer.h[0]
    assert weight_bytes(module, 1, [layer]) == whole - num_bytes(layer)


def test_weights_of_experts() -> None:
    """Of 4 experts with 2 per token, N tokens read 4 (1 - 1/2^N) on average."""
    module = tiny_module("mixtral")
    experts = [w for name, w in module.named_parameters() if ".experts." in name]
    size = sum(weight.nbytes for weight in experts)
    table = module.get_input_embeddings().weight
    row = table.nbytes // table.shape[0]
    assert size > 0
    assert weight_bytes(module, 3) - weight_bytes(module, 1) - 2 * row == pytest.approx(
        size * (1 / 2 - 1 / 8), abs=1
    )


@pytest.mark.parametrize("family", ["t5", "bart", "marian"])
def test_weights_of_encoder_decoders(family: str) -> None:
    """A decoder's pass reads neither the encoder nor the projections of cross-attention K and V."""
    module = tiny_seq2seq_module(family)
    decoder, head = module.get_decoder(), module.get_output_embeddings().weight
    cross = [
        w
        for name, w in decoder.named_parameters()
        if any(part in name for part in ("EncDecAttention.k.", "EncDecAttention.v."))
        or ("encoder_attn.k_proj" in name or "encoder_attn.v_proj" in name)
    ]
    assert cross
    tables = [p.weight for p in decoder.modules() if isinstance(p, torch.nn.Embedding)]
    read = num_bytes(decoder) - sum(w.nbytes for w in cross)
    rows = 0
    for table in {id(t): t for t in tables}.values():
        if table is not head:
            read -= table.nbytes
            rows += table.nbytes // table.shape[0]
    if all(table is not head for table in tables):
        read += head.nbytes
    others = sum(b.nbytes for name, b in module.named_buffers() if "encoder." not in name)
    assert weight_bytes(module) == read + rows + others


def test_a_wrapped_weight_counts_the_bytes_of_its_parts() -> None:
    """Quantised weights wrap other tensors, and report the shape before quantisation."""
    numbers = torch.zeros(8, 4, dtype=torch.bfloat16)
    assert stored_bytes(numbers) == 64
    assert stored_bytes(TwoTensor(numbers, numbers.clone())) == 128


@pytest.mark.parametrize("family", ["llama", "mistral", "gemma3"])
def test_bytes_of_keys_and_values(family: str) -> None:
    """Two vectors per head, layer and token; the sliding window has 8 tokens."""
    model = tiny(family)
    (prompt,) = ragged_prompts([12])
    _, cache = pass_times(model, prompt, widths=(1,), repeats=1)
    config = model.module.config
    per_token = 2 * config.num_key_value_heads * config.head_dim * 4
    attended = {"llama": [12, 12], "mistral": [8, 8], "gemma3": [8, 12, 8]}[family]
    assert cache_bytes(model, cache, 12) == per_token * sum(attended)
    assert cache_bytes(model, cache, 3) == per_token * 3 * len(attended)


def test_keys_and_values_of_a_source_count_in_full() -> None:
    model = tiny_seq2seq("t5")
    times, cache = pass_times(model, [0, 5, 6], [7, 8, 9, 4], widths=(1, 2), repeats=1)
    assert list(times) == [1, 2]
    more = cache_bytes(model, cache, 3) - cache_bytes(model, cache, 2)
    assert cache_bytes(model, cache, 0) == cache.cross.num_bytes()  # type: ignore[attr-defined]
    assert cache_bytes(model, cache, 3) == cache.cross.num_bytes() + 3 * more  # type: ignore[attr-defined]


def test_a_floor_is_bytes_over_bandwidth() -> None:
    floor = Floor(weights=900, keys_values=100, bandwidth=500.0, cached=True)
    assert floor.seconds == 2.0
    assert floor.as_dict() == {
        "weights": 900,
        "keys_values": 100,
        "bandwidth": 500.0,
        "cached": True,
        "seconds": 2.0,
    }


def test_bandwidth_and_cache() -> None:
    found = read_bandwidth(torch.device("cpu"), 2**20, repeats=3)
    assert found.num_bytes == 2**20
    assert 0 < found.lowest <= found.median <= found.highest
    assert found.matrix_vector > 0
    size = last_level_cache(torch.device("cpu"))
    assert size is None or size >= 2**10
    assert last_level_cache(torch.device("meta")) is None


def test_widths_beyond_the_context_are_left_out() -> None:
    """And timing commits nothing to the KV cache."""
    model = tiny()
    (prompt,) = ragged_prompts([122])
    times, cache = pass_times(model, prompt, widths=(1, 2, 7, 8), repeats=1)
    assert list(times) == [1, 2, 7]
    assert cache.length_B.tolist() == [121]
    assert context_of(model, prompt, None).lengths == [122]


def test_the_formula() -> None:
    """With γ = 5, c = 0.01 and α = 2/3 there is a gain until β reaches 2.69, as in the survey."""
    assert expected_tokens(0.5, 2) == 1.75
    assert expected_tokens(1.0, 4) == 5
    alpha, gamma, c = 2 / 3, 5, 0.01
    at_the_limit = expected_tokens(alpha, gamma) - gamma * c
    assert at_the_limit == pytest.approx(2.687, abs=1e-3)
    found = SpeedUp(0.9, alpha, gamma, 3.0, gamma * c, c, at_the_limit, chain=True)
    assert found.by_alpha == pytest.approx(1.0)
    assert found.as_dict()["reached_by_alpha"] == pytest.approx(0.9)
    assert found.by_tokens == pytest.approx(3.0 / expected_tokens(alpha, gamma))
    tree = SpeedUp(0.9, alpha, gamma, 3.0, gamma * c, c, at_the_limit, chain=False).as_dict()
    assert tree["by_alpha"] is None
    assert tree["expected_tokens"] is None
    assert tree["reached_by_tokens"] == pytest.approx(0.9 / found.by_tokens)

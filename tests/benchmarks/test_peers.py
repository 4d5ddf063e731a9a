"""The comparison with peers: counts, bars and the page, with fake peers."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import tiny_module
from torch import nn

from benchmarks import peers, perplexity
from benchmarks.peer_workers.client import Client, PeerError
from benchmarks.peer_workers.compare import (
    BARS,
    GROUPS,
    OURS,
    OURS_EQUAL,
    Series,
    acceptance_length,
    first_difference,
    reference,
    summary,
    verdicts,
)
from benchmarks.peer_workers.outrider_worker import Outrider, blocks, rounds_inputs
from benchmarks.peer_workers.page import markdown
from benchmarks.peer_workers.protocol import BLOCKS, KINDS, Answer, Job, Ready
from benchmarks.peer_workers.registry import PEERS, Environments, once, parse_rows
from benchmarks.peer_workers.transformers_worker import Transformers
from outrider import assets
from outrider.lab.metadata import instructions, run_metadata

JOB = Job("target", "draft", 5, 2, 128, "exports")
ABOUT: dict[str, Any] = {
    **dict.fromkeys(("date", "hardware", "prompts", "repeats", "command"), "x"),
    "num_speculative_tokens": 5,
    "parameters": 12_600_000,
    "prompt_tokens": 48,
    "max_new_tokens": 64,
    "one_at_a_time": False,
}
READY = Ready("float32", 2, "fake 1.0", seconds=1.5, export_seconds=0.5)

FAKE = """
from benchmarks.peer_workers.protocol import Answer, Likelihood, Ready, serve

class Fake:
    def prepare(self, row, job):
        if row == "broken":
            raise ValueError("no such row\\nand more")
        print("output of libraries is no answer")
        return Ready("float32", job.threads, "fake 1.0", 0.0)

    def generate(self, row, prompt, num_tokens):
        if row == "dead":
            raise SystemExit(3)
        return Answer([prompt[0] + n for n in range(num_tokens)], 0.5, drafted=4, accepted=2)

    def likelihood(self, texts):
        return Likelihood(0.0, sum(map(len, texts)))

    def close(self):
        pass

serve(Fake())
"""


@pytest.fixture
def fake(tmp_path: Path) -> Client:
    (tmp_path / "fake.py").write_text(FAKE)
    command = [sys.executable, "-c", f"exec(open({str(tmp_path / 'fake.py')!r}).read())"]
    return Client(command, tmp_path / "fake.log")


def series(name: str, texts: list[list[int]], seconds: list[float]) -> Series:
    """One repeat for every number of seconds, which is the time of each text."""
    passes = [[Answer(text, spent, accepted=1) for text in texts] for spent in seconds]
    return Series(name, READY, 2.0, passes)


def test_a_worker_answers_and_continues_after_a_failure(fake: Client) -> None:
    with fake:
        assert fake.prepare("plain", JOB).threads == 2
        with pytest.raises(PeerError, match=r"^ValueError: no such row$"):
            fake.prepare("broken", JOB)
        assert fake.generate("plain", [7], 3) == Answer([7, 8, 9], 0.5, 4, 2)
        assert fake.likelihood([[7], [8, 9]]).perplexity == 1
        with pytest.raises(PeerError, match="ended with code 3"):
            fake.generate("dead", [7], 3)
    assert fake.process.returncode == 3


def test_a_run_alternates_rows_and_names_missing_peers(
    fake: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    environments = Environments(tmp_path, {})
    monkeypatch.setattr(Environments, "start", start_only(fake))
    job = Job("target", "draft", 5, 2, 128, str(tmp_path))
    rows = parse_rows(["transformers:plain", "transformers:assisted", "openvino:plain"])
    run = peers.Run(rows, environments, job, [[1], [2, 3]], 4)
    assert list(run.all_in_memory(repeats=3)) == [1, 2, 3]
    plain, _, absent = run.series.values()
    assert plain.texts == [[1, 2, 3, 4], [2, 3, 4, 5]]
    assert [len(one.passes) for one in run.series.values()] == [3, 3, 0]
    assert "not installed" in absent.error
    report = run.report("embedded", {})
    assert report["rows"]["transformers:plain"]["median"] == 8
    assert report["rows"]["openvino:plain"] == {"error": "not installed: no interpreter"}


def start_only(client: Client) -> Any:
    """A replacement of ``Environments.start`` that has only transformers, with a given client."""

    def start(self: Environments, entry: Any, log: Path) -> Client:
        if entry.name != "transformers":
            raise FileNotFoundError("no interpreter")
        return client

    return start


def test_a_peer_without_an_interpreter_raises_an_error(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match="openvino"):
        Environments(tmp_path, {}).command(PEERS["openvino"])
    named = Environments(tmp_path, {"openvino": sys.executable}).command(PEERS["openvino"])
    assert named[0] == sys.executable


def test_rows_are_parsed_by_peer_or_individually() -> None:
    assert parse_rows(["openvino:speculative"]) == [("openvino", "speculative")]
    assert [row for _, row in parse_rows(["vllm"])] == list(PEERS["vllm"].rows)
    for wrong in ("nobody", "vllm:nothing"):
        with pytest.raises(ValueError, match="no"):
            parse_rows([wrong])
    for plan in peers.PLANS.values():
        assert parse_rows(plan.rows)


def test_every_bar_compares_rows_of_a_plan() -> None:
    for bar in BARS:
        assert bar.pair in peers.PLANS
        asked = {":".join(key) for key in parse_rows(peers.PLANS[bar.pair].rows)}
        for group in (bar.ours, bar.theirs):
            assert asked >= set(GROUPS.get(group, (group,)))


def test_lengths_and_differences() -> None:
    assert acceptance_length([Answer([1] * 8, 1.0, accepted=6)]) == 4
    assert acceptance_length([Answer([1] * 8, 1.0, accepted=0)]) == 1
    assert acceptance_length([Answer([1], 1.0, accepted=0), Answer([1], 1.0)]) is None
    assert first_difference([1, 2, 3], [1, 2, 3]) is None
    assert first_difference([1, 9, 3], [1, 2, 3]) == 1
    assert first_difference([1, 2], [1, 2, 3]) == 2


def test_speed_covers_all_prompts_and_spread_all_repeats() -> None:
    plain = series("outrider:plain", [[1, 2], [3, 4]], [1.0, 0.5, 2.0])
    other = series("openvino:plain", [[1, 2], [3, 5]], [1.0])
    assert reference({"outrider:plain": plain, "openvino:plain": other}) is plain
    row = summary(other, plain)
    assert row["equal_texts"] == 1
    assert row["first_differences"] == [1]
    row = summary(plain, plain)
    assert (row["slowest"], row["median"], row["fastest"]) == (1, 2, 4)
    assert row["equal_texts"] == row["texts"] == 2
    assert row["equal_to_itself"]


def test_bars_apply_to_their_own_pair_only() -> None:
    rows = {OURS: {"median": 8.0}, "transformers:assisted": {"median": 2.0}}
    bars = {bar["theirs"]: bar for bar in verdicts("embedded", rows)}
    assert bars["transformers:assisted"]["ratio"] == 4
    assert bars["transformers:assisted"]["met"] is True
    assert bars["openvino:speculative"]["met"] is None
    rows["transformers:assisted"]["median"] = 2.1
    assert verdicts("embedded", rows)[0]["met"] is False


def test_the_fastest_row_of_a_group_counts() -> None:
    rows: dict[str, dict[str, float]] = {name: {"median": 1.0} for name in GROUPS[OURS_EQUAL]}
    rows["outrider:auto q8_0 compiled"] = {"median": 6.0}
    rows |= {"openvino:plain": {"median": 2.0}, "llama.cpp:plain q8_0": {"median": 4.0}}
    rows["llama.cpp:plain q4_0"] = {"median": 8.0}  # of another perplexity
    (bar,) = [bar for bar in verdicts("smollm2", rows) if bar["ours"] == OURS_EQUAL]
    assert bar["fastest"] == ["outrider:auto q8_0 compiled", "llama.cpp:plain q8_0"]
    assert bar["ratio"] == 1.5
    rows["openvino:speculative"] = {"median": 5.0}  # whose samples are of another distribution
    assert bar in verdicts("smollm2", rows, temperature=0.8)
    assert bar not in verdicts("smollm2", rows)
    report = {"about": ABOUT, "rows": {}, "bars": [bar]}
    assert "perplexity (`llama.cpp:plain q8_0`) | 1.30× | 1.50× | met |" in markdown(
        {"pairs": {"smollm2": report}}
    )


def test_the_page_has_all_results_of_both_pairs(tmp_path: Path) -> None:
    plain = series("outrider:plain", [[1, 2], [3, 4]], [1.0, 0.5])
    fast = series("outrider:speculative", [[1, 2], [3, 5]], [0.25, 0.25])
    missing = Series("vllm:plain", error="not installed: no interpreter")
    rows = {one.name: summary(one, plain) for one in (plain, fast, missing)}
    pairs = "embedded", "1B-cost"
    for pair in pairs:
        report = {"about": ABOUT, "rows": rows, "bars": verdicts(pair, rows)}
        page = peers.written(tmp_path, pair, report)
    assert "| outrider | speculative | float32 | 2 | 8.0 | 8.0–8.0 |" in page
    assert "1 of 2" in page
    assert "- vllm:plain: not installed: no interpreter" in page
    assert "outrider:speculative differs from plain Outrider at 1" in page
    assert page.count("not measured |") == sum(bar.pair in pairs for bar in BARS)
    assert markdown(json.loads((tmp_path / "peers.json").read_text())) == page


def test_perplexities_within_one_percent_count_as_equal() -> None:
    about = {**run_metadata(command="c"), "threads": 1, "pair": "p", "texts": 2, "tokens": 9}
    found = {"bfloat16": 10.0, "q8_0": 10.09, "q4_0": 11.0}
    page = perplexity.page({"about": about, "perplexities": found})
    assert "| q8_0 | 10.090 | +0.90% | yes |" in page
    assert "| q4_0 | 11.000 | +10.00% | no |" in page


def test_prompts_are_of_every_kind() -> None:
    found = peers.texts(6)
    assert len(set(found)) == 6
    assert found[0] == peers.PROMPTS[0]


def test_chat_prompts_come_from_all_files_in_turn(tmp_path: Path) -> None:
    files = [tmp_path / "one.jsonl", tmp_path / "two.jsonl"]
    for file in files:
        asked = [[{"role": "user", "content": f"{file.stem} {i}"}] for i in range(3)]
        file.write_text("".join(json.dumps({"messages": each}) + "\n" for each in asked))

    class Tokenizer:
        def apply_chat_template(self, messages: Any, **_: Any) -> Any:
            return messages[0]["content"]

    assert peers.chats(files, 3, Tokenizer()) == ["one 0", "two 0", "one 1"]


def test_sampled_rows_have_a_section_of_their_own() -> None:
    assert peers.section("smollm2", "bfloat16", 0.8) == "smollm2, bfloat16, temperature 0.8"
    assert peers.section("smollm2", "bfloat16", chats=True) == "smollm2, bfloat16, chats"


def test_gguf_has_the_models_weights_with_interleaved_queries(tmp_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    from benchmarks.peer_workers.gguf_export import export

    module = tiny_module(seed=1)
    module.save_pretrained(tmp_path)
    tokenizer = {"added_tokens": [{"id": 0, "content": "<end>"}]}
    tokenizer["model"] = {"vocab": {"a": 1, "b": 2, "ab": 3}, "merges": [["a", "b"]]}
    (tmp_path / "tokenizer.json").write_text(json.dumps(tokenizer))
    export(tmp_path, tmp_path / "tiny.gguf")
    read = gguf.GGUFReader(tmp_path / "tiny.gguf")
    config = module.config
    assert read.get_field("llama.block_count").contents() == config.num_hidden_layers
    assert read.get_field("llama.rope.freq_base").contents() == 10000.0
    assert len(read.get_field("tokenizer.ggml.tokens").contents()) == config.vocab_size
    tensors = {tensor.name: tensor.data for tensor in read.tensors}
    assert len(tensors) == len(module.state_dict())
    query = module.model.layers[0].self_attn.q_proj.weight.detach().numpy()
    half = config.head_dim // 2
    assert (tensors["blk.0.attn_q.weight"][:4] == query[[0, half, 1, half + 1]]).all()


def test_no_row_is_run_twice_in_one_precision() -> None:
    """Rows that name a precision run beside the others, unless it is the run's own."""
    every = parse_rows(["llama.cpp", "openvino"])
    for dtype, own in (("float32", "f32"), ("bfloat16", "bf16")):
        rows = once(every, dtype)
        assert ("llama.cpp", "speculative") in rows
        assert ("openvino", "plain f16") in rows
        kinds = {row.rpartition(" ")[2] for _, row in rows}
        assert kinds & set(KINDS.values()) == set(KINDS.values()) - {own}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("worker", [Outrider, Transformers])
def test_workers_run_in_the_requested_precision(worker: Any, dtype: str, tmp_path: Path) -> None:
    folder = str(assets.draft_path())
    job = Job(folder, folder, 3, 1, 64, str(tmp_path), dtype)
    peer = worker()
    assert peer.prepare("plain", job).precision == dtype
    assert len(peer.generate("plain", [5, 6, 7], 4).tokens) == 4
    assert {str(model.dtype) for model in peer.models.values()} == {f"torch.{dtype}"}


def test_llama_cpps_kv_cache_has_the_precision_of_the_weights() -> None:
    pytest.importorskip("gguf")
    from benchmarks.peer_workers.llama_cpp_worker import options

    command = options(JOB, Path("target"), Path("draft"), "bf16")
    for option in ("-ctk", "-ctv", "-ctkd", "-ctvd"):
        assert command[command.index(option) + 1] == "bf16"


def test_blocks_are_of_the_weights_alone() -> None:
    """The KV cache has the precision of the job."""
    pytest.importorskip("gguf")
    from benchmarks.peer_workers.llama_cpp_worker import options

    command = options(JOB, Path("target"), None, "q8_0")
    assert [command[command.index(option) + 1] for option in ("-ctk", "-ctv")] == ["f32", "f32"]


def test_plans_have_rows_of_blocks_for_both_peers_that_read_them() -> None:
    rows = parse_rows(peers.PLANS["smollm2"].rows)
    for kind in BLOCKS:
        assert {("outrider", f"plain {kind} compiled"), ("llama.cpp", f"plain {kind}")} <= set(rows)
        assert ("outrider", f"plain {kind}+a8 compiled") in rows
    assert not any(kind in row for row in peers.PLANS["embedded"].rows for kind in BLOCKS)


@pytest.mark.parametrize(
    ("how", "format_", "rounds"),
    [
        (["compiled"], None, False),
        (["q4_1", "compiled"], "q4_1", False),
        (["q8_0+a8"], "q8_0", True),
    ],
)
def test_rows_name_blocks_and_rounded_inputs(
    how: list[str], format_: str | None, rounds: bool
) -> None:
    assert blocks(how) == format_
    assert rounds_inputs(how) is rounds


def test_outrider_keeps_the_blocks_of_the_file_that_llama_cpp_reads(tmp_path: Path) -> None:
    pytest.importorskip("gguf")
    from benchmarks.peer_workers.pairs import embedded

    folder = str(embedded(tmp_path).draft)
    peer = Outrider()
    ready = peer.prepare("plain q8_0", Job(folder, folder, 3, 1, 64, str(tmp_path)))
    assert ready.precision == "q8_0"
    (target,) = peer.models.values()
    assert target.name.endswith("q8_0.gguf")
    assert any(each.weight.ndim == 4 for each in map(_linear, target.module.modules()) if each)
    assert len(peer.generate("plain q8_0", [5, 6, 7], 4).tokens) == 4


def _linear(module: nn.Module) -> nn.Linear | None:
    return module if isinstance(module, nn.Linear) else None


def test_each_precision_has_a_section_with_the_vector_level(tmp_path: Path) -> None:
    row = summary(series("outrider:plain", [[1, 2]], [1.0]), None)
    about = ABOUT | {"pair": "embedded", "hardware": f"EPYC ({', '.join(instructions())})"}
    for dtype in ("float32", "bfloat16"):
        report = {"about": about | {"dtype": dtype}, "rows": {"outrider:plain": row}, "bars": []}
        page = peers.written(tmp_path, peers.section("embedded", dtype), report)
    assert "## The embedded pair in float32" in page
    assert "## The embedded pair in bfloat16" in page
    assert page.count(f"EPYC ({torch.backends.cpu.get_cpu_capability()}") == 2

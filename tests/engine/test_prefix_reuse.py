"""``prefix_cache``: a prompt that begins as an earlier sequence did is read from there on, and no
output changes."""

from collections import Counter
from collections.abc import Callable
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, tiny_module, token_ids
from tiny_ngrams import tiny_file
from tiny_seq2seq import tiny_seq2seq

from outrider import Engine, Sampling, load
from outrider.core import Capabilities
from outrider.core.errors import (
    InvalidParameterError,
    NonFiniteLogitsError,
    OutOfMemoryError,
    OutriderWarning,
)
from outrider.drafters.chain.none import NoDraft
from outrider.engine.running_batch import RunningBatch
from outrider.methods import METHODS, Method
from outrider.runtime import HFModel
from outrider.runtime.executors.prepare import prepare
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.kernels import build
from outrider.runtime.kv_cache.footprint import Footprint
from outrider.verifiers import Rejection

SIZE = "1GB"
SAMPLED = Sampling(temperature=0.9, top_p=0.95, max_new_tokens=9, ignore_eos=True, seed=3)
TARGET, DRAFT = tiny(seed=1, name="target"), tiny(seed=1, std=0.28, name="draft")
ALL = (
    "plain",
    "speculative",
    "suffix",
    "prompt-lookup",
    "sequoia",
    "staged",
    "early-exit",
    "ngram",
)


def engine(method: str = "speculative", **settings: Any) -> Engine:
    options = {"ngram": {"file": tiny_file()}}.get(method, {})
    return engine_of(TARGET, DRAFT, method, 4, options=options, **settings)


def turns(
    each: Engine, sampling: Sampling, prompts: list[list[int]], num: int = 3
) -> list[list[tuple[int, ...]]]:
    """Answers to conversations: each prompt is the last one, its answer, and a few tokens more."""
    answers = []
    for turn in range(num):
        results = each.generate(prompts, sampling)
        answers.append(token_ids(results))
        pairs = zip(prompts, results, strict=True)
        prompts = [[*old, *found.token_ids, *range(turn, 4)] for old, found in pairs]
    return answers


@pytest.fixture
def read(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """Query tokens per row that each model has run over, by its name."""
    seen: Counter[str] = Counter()
    forward = HFModel.forward

    def counted(self: HFModel, batch: ForwardBatch) -> ForwardOutput:
        seen[self.name] += batch.tokens_BN.shape[1]
        return forward(self, batch)

    monkeypatch.setattr(HFModel, "forward", counted)
    return seen


@pytest.mark.parametrize("sampling", [greedy(9), SAMPLED], ids=["greedy", "sampled"])
@pytest.mark.parametrize("method", ALL)
def test_no_output_changes(method: str, sampling: Sampling) -> None:
    """Three conversations of different lengths in one batch, three turns each."""
    prompts = ragged_prompts([17, 1, 30])
    reusing = engine(method, prefix_cache=SIZE)
    assert turns(reusing, sampling, prompts) == turns(engine(method), sampling, prompts)


def test_a_turn_reads_only_the_tokens_that_are_new(read: Counter[str]) -> None:
    """The target has not read the last answer's last token, nor the new ones; the draft model may
    lack one more."""
    each = engine(prefix_cache=SIZE)
    first = each.generate([ragged_prompts([40])[0]], greedy(9))[0]
    assert first.stats.reused == 0
    prompt = [*first.prompt_ids, *first.token_ids, 5, 6, 7]
    with closing(each.run(prompt, greedy(9))) as rows:
        read.clear()
        row = next(rows)
    num_scored = 5  # the root and the draft of one round
    assert row.stats.reused == 40 + 9 - 1
    assert read["target"] == 3 + num_scored
    assert read["draft"] in (3 + 4, 4 + 4)  # and the root with the draft's first three tokens
    read.clear()
    engine().generate([prompt], greedy(1))
    assert read["target"] == 51 + 1


def test_nothing_is_kept_unless_it_is_asked_for() -> None:
    each = engine()
    assert turns(each, greedy(4), ragged_prompts([9]))
    assert each.prefixes is None
    assert each.target.prefixes is None
    assert TARGET.prefixes is None, "the models that an engine is given are not changed"


def test_a_changed_beginning_is_read_anew() -> None:
    """Only what stands before the first changed token is reused."""
    prompts = ragged_prompts([30])
    each = engine(prefix_cache=SIZE)
    each.generate(prompts, greedy(6))
    for changed in (0, 11, 29):
        prompt = list(prompts[0])
        prompt[changed] = (prompt[changed] + 1) % 101
        found = each.generate([prompt], greedy(6))[0]
        assert found.stats.reused == min(changed, 29)
        assert found.token_ids == engine().generate([prompt], greedy(6))[0].token_ids


def test_the_same_prompt_again_is_not_read_at_all(read: Counter[str]) -> None:
    each, prompts = engine("plain", prefix_cache=SIZE), ragged_prompts([30])
    wanted = each.generate(prompts, greedy(5))[0]
    read.clear()
    found = each.generate(prompts, greedy(5))[0]
    assert (found.stats.reused, read["target"]) == (29, 5)
    assert found.token_ids == wanted.token_ids


def test_an_interrupted_output_is_reused_as_far_as_it_came() -> None:
    each, prompt = engine(prefix_cache=SIZE), ragged_prompts([25])[0]
    stream = each.stream(prompt, greedy(30))
    written = [*next(stream).token_ids, *next(stream).token_ids]
    stream.close()
    follow_up = [*prompt, *written, 1, 2, 3]
    found = each.generate([follow_up], greedy(9))[0]
    assert found.stats.reused == len(prompt) + len(written) - 1
    assert found.token_ids == engine().generate([follow_up], greedy(9))[0].token_ids


def test_a_prompt_that_is_left_while_it_is_read_is_reused_so_far(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("outrider.runtime.prefill.PREFILL_WIDTH", 8)
    each, prompts = engine(prefix_cache=SIZE), ragged_prompts([50, 12])
    scheduler = each.new_scheduler()
    monkeypatch.setattr("outrider.engine.scheduler.PROMPT_TOKENS_PER_STEP", 1)
    running = scheduler.add(each.request(prompts[1], greedy(30)))
    scheduler.step()
    ids = [scheduler.add(each.request(prompt, greedy(9))) for prompt in ([*prompts[0]], [7, 8])]
    scheduler.step()
    for request_id in (ids[0], running, ids[1]):
        scheduler.abort(request_id)
    monkeypatch.undo()
    found = each.generate([prompts[0]], greedy(9))[0]
    assert found.token_ids == engine().generate([prompts[0]], greedy(9))[0].token_ids


def test_rows_of_a_batch_share_what_one_of_them_lacks(read: Counter[str]) -> None:
    """A forward pass is a rectangle: a new conversation beside a long one is read as if alone."""
    each, (old, new) = engine("plain", prefix_cache=SIZE), ragged_prompts([60, 20])
    each.generate([old], greedy(4))
    read.clear()
    found = each.generate([[*old, 1], new], greedy(1))
    assert [result.stats.reused for result in found] == [60 - 19, 0]
    assert read["target"] == 19 + 1
    assert token_ids(found) == token_ids(engine("plain").generate([[*old, 1], new], greedy(1)))


@pytest.mark.parametrize("family", ["gpt2", "gemma3", "mistral", "opt"])
def test_other_families(family: str) -> None:
    """Learned positions, windows, mixed layers."""
    target, prompts = tiny(family), ragged_prompts([17, 5])
    pair = [engine_of(target, prefix_cache=size) for size in (SIZE, None)]
    one, other = (turns(each, greedy(9), prompts) for each in pair)
    assert one == other


@pytest.mark.parametrize("kv_dtype", ["int8", "bfloat16"])
def test_quantised_kv_caches(kv_dtype: str) -> None:
    each = engine(kv_dtype=kv_dtype, prefix_cache=SIZE)
    wanted = turns(engine(kv_dtype=kv_dtype), greedy(9), ragged_prompts([17, 5]))
    assert turns(each, greedy(9), ragged_prompts([17, 5])) == wanted
    assert each.prefixes is not None
    assert each.prefixes.own_bytes() > 0


@pytest.mark.skipif(build.find_compiler() is None, reason="no C++ compiler here")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_exact_model_has_the_same_bits(dtype: torch.dtype) -> None:
    """Log-probabilities are equal, not only close."""
    outputs = []
    for size in (SIZE, None):
        target = tiny(seed=1, dtype=dtype)
        prepare(target, "off", exact=True)
        each = engine_of(target, None, "suffix", prefix_cache=size)
        sampling = Sampling(temperature=0.9, max_new_tokens=9, logprobs=0, ignore_eos=True)
        prompt, found = ragged_prompts([21])[0], []
        for _ in range(3):
            result = each.generate([prompt], sampling)[0]
            found.append((result.token_ids, result.logprobs))
            prompt = [*prompt, *result.token_ids, 4, 2]
        outputs.append(found)
        assert (result.stats.reused > 0) == (size is not None)
    assert outputs[0] == outputs[1]


# ------------------------------------------------------------------------------------ memory


def per_token(each: Engine) -> int:
    return Footprint.of(each.target).slot


def test_the_sequences_unused_for_longest_are_dropped() -> None:
    """There is memory for two of three conversations; the first one was used last."""
    prompts = ragged_prompts([40, 40, 40])
    slot = per_token(engine("plain"))
    each = engine("plain", prefix_cache=2 * 45 * slot)
    for index in (0, 1, 0, 2):
        each.generate([prompts[index]], greedy(1))
    reused = [each.generate([p], greedy(1))[0].stats.reused > 0 for p in (prompts[2], prompts[0])]
    assert reused == [True, True]
    assert each.generate([prompts[1]], greedy(1))[0].stats.reused == 0
    assert each.prefixes is not None
    assert each.prefixes.own_bytes() <= 2 * 45 * slot


def test_a_sequence_that_goes_on_takes_the_memory_of_its_beginning() -> None:
    each = engine("plain", prefix_cache=SIZE)
    turns(each, greedy(4), ragged_prompts([10]), num=3)
    assert each.prefixes is not None
    length = 10 + 4 + 4 + 4 + 3 + 4 - 1
    assert each.prefixes.own_bytes() == length * per_token(each)


def test_a_sequence_beyond_the_bound_is_not_kept() -> None:
    each = engine("plain", prefix_cache=64)
    assert turns(each, greedy(4), ragged_prompts([10])) == turns(
        engine("plain"), greedy(4), ragged_prompts([10])
    )
    assert each.prefixes is not None
    assert each.prefixes.own_bytes() == 0


def held(each: Engine) -> int:
    memory_budget = each.target.plan.memory_budget
    assert memory_budget is not None
    return memory_budget.held()


@pytest.mark.parametrize("share", [1.0, 1.4, 2.5])
def test_max_memory_bounds_prefixes_and_requests_together(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompts = ragged_prompts([40, 40, 40, 60])
    roomy = engine(max_memory=SIZE)
    assert roomy._memory is not None
    need = max(
        roomy._memory.final(1, roomy._memory.extent(roomy.request(p, greedy(9)))) for p in prompts
    )
    bound = int(share * need)
    each = engine(max_memory=bound, prefix_cache=SIZE)
    most, step = [0], RunningBatch.step

    def watched(self: RunningBatch) -> None:
        step(self)
        most[0] = max(most[0], held(each))

    monkeypatch.setattr(RunningBatch, "step", watched)
    for _ in range(2):
        for prompt in prompts:
            found = each.generate([prompt], greedy(9))[0]
            assert found.token_ids == engine().generate([prompt], greedy(9))[0].token_ids
            assert held(each) <= bound
    assert 0 < most[0] <= bound
    assert each.prefixes is not None
    assert (each.prefixes.own_bytes() > 0) == (share > 1)


def test_prefixes_are_dropped_where_memory_runs_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The request then goes on, and fails if that has not helped."""
    each, prompts = engine(prefix_cache=SIZE), ragged_prompts([40, 30])
    each.generate([prompts[0]], greedy(4))
    wanted = token_ids(engine().generate([prompts[1]], greedy(4)))
    prefixes = each.prefixes
    assert prefixes is not None
    step = RunningBatch.step

    def scarce(self: RunningBatch) -> None:
        if prefixes.own_bytes():
            raise OutOfMemoryError("no memory")
        step(self)

    monkeypatch.setattr(RunningBatch, "step", scarce)
    assert token_ids(each.generate([prompts[1]], greedy(4))) == wanted

    def exhausted(self: RunningBatch) -> None:
        raise OutOfMemoryError("no memory")

    monkeypatch.setattr(RunningBatch, "step", exhausted)
    with pytest.raises(OutOfMemoryError):
        each.generate([prompts[1]], greedy(4))


def test_damaged_keys_are_not_kept() -> None:
    module = tiny_module(seed=1)
    with torch.no_grad():
        module.get_input_embeddings().weight[7] = torch.nan
    each = engine_of(HFModel(module, name="target"), prefix_cache=SIZE)
    with pytest.raises(NonFiniteLogitsError):
        each.generate([[1, 2, 7, 3]], greedy(4))
    assert each.prefixes is not None
    assert each.prefixes.own_bytes() == 0


# ------------------------------------------------------------------------------- bad arguments


@pytest.mark.parametrize("size", ["much", 0, -1, "0"])
def test_a_size_that_is_none(size: object) -> None:
    with pytest.raises(InvalidParameterError, match=r"prefix_cache=.*such as 512MiB"):
        engine(prefix_cache=size)


class Reading(NoDraft):
    """A drafter that declares that it reads hidden states."""

    capabilities: Capabilities = Capabilities(hidden_layers=(1,))


def reading() -> tuple[HFModel, Method]:
    method = Method("reading", "Reads.", "tests", "nothing", Rejection, lambda parts: Reading())
    return tiny(), method


@pytest.mark.parametrize(
    ("parts", "reason"),
    [
        (reading, "method 'reading' reads the target's hidden states of the whole prompt"),
        (lambda: (tiny_seq2seq("t5"), METHODS["plain"]), "is an encoder-decoder"),
    ],
)
def test_no_reuse_where_prompts_must_be_read(
    parts: Callable[[], tuple[HFModel, Method]], reason: str
) -> None:
    target, method = parts()
    with pytest.warns(OutriderWarning, match=f"no prefix reuse: .*{reason}"):
        each = engine_of(target, None, method, prefix_cache=SIZE)
    assert each.prefixes is None
    assert each.target.prefixes is None


# --------------------------------------------------------------------------------- a real model

SMOLLM2 = Path(__file__).parents[2] / "runs" / "smollm2" / "model"


@pytest.mark.slow
@pytest.mark.skipif(not SMOLLM2.is_dir(), reason="needs runs/smollm2/model: make real")
def test_a_conversation_with_a_real_model() -> None:
    """Its tokenizer encodes answers as they were written, so that a turn reads only the next
    message; float32 leaves no near-ties among the best tokens here."""
    said = ["What is the capital of France?", "And of Italy?", "Name a river there."]
    sampling = Sampling(temperature=0, max_new_tokens=24)
    outputs = []
    for size in (SIZE, None):
        each = load(SMOLLM2, None, "suffix", dtype="float32", device="cpu", prefix_cache=size)
        messages: list[dict[str, str]] = []
        found, reused = [], []
        for message in said:
            messages.append({"role": "user", "content": message})
            result = each.chat(messages, sampling)
            messages.append({"role": "assistant", "content": result.text})
            reused.append(result.stats.reused)
            found.append(result)
        if size is not None:
            for before, after in zip(found, reused[1:], strict=False):
                assert after >= len(before.prompt_ids) + len(before.token_ids) - 1
        outputs.append(token_ids(found))
    assert outputs[0] == outputs[1]

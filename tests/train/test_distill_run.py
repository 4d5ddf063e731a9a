"""Whole runs on a tiny target: resuming after a kill, the finished draft, and bad input."""

import json
import random
import signal
import time

import pytest
import torch
from fork_server import fork_server
from safetensors.torch import load_file
from tiny_distillation import (
    TEMPLATE,
    distil_mixture,
    distillation,
    prompts_file,
    quiet,
    save_target,
    target,
)
from tiny_models import tiny_module
from transformers import AutoModelForCausalLM, AutoTokenizer

import outrider
from outrider.core.errors import (
    InvalidParameterError,
    ModelLoadError,
    PromptError,
    VocabularyMismatchError,
)
from outrider.train.checkpoint import CHECKPOINT
from outrider.train.distill import data as data_module
from outrider.train.distill import run as run_module
from outrider.train.distill.run import distil
from outrider.train.distill.settings import DATA, LOSSES, Start
from outrider.train.distill.shape import Shape

MIXED = {"data": {"kind": "mixture", "shares": {"target": 0.5, "replay": 0.5}}}


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target") / "tiny-target")


@pytest.fixture(scope="module")
def prompts(tmp_path_factory):
    return prompts_file(tmp_path_factory.mktemp("prompts"))


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def finished(tmp_path_factory, source, prompts, cache):
    """The folder of a run that nothing interrupted, of the target's and the draft's samples."""
    folder = tmp_path_factory.mktemp("finished")
    distil(distillation(folder, source, prompts, cache=cache, **MIXED), quiet(), "a command")
    return folder


def weights(folder):
    return torch.load(folder / CHECKPOINT)["model"]


def assert_same(left, right):
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)


def assert_same_run(folder, finished):
    assert_same(weights(folder), weights(finished))
    for name in ("best", "last"):
        assert_same(
            load_file(folder / name / "model.safetensors"),
            load_file(finished / name / "model.safetensors"),
        )
    assert (folder / "measurements.json").read_text() == (
        finished / "measurements.json"
    ).read_text()


@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_crash_is_resumed_bit_for_bit(
    tmp_path, source, prompts, cache, finished, stop, monkeypatch
):
    """Between checkpoints, between a measurement and its checkpoint, and after the last."""
    run = distillation(tmp_path, source, prompts, cache=cache, **MIXED)
    rows = run_module.StepRows.__call__

    def crash(self, step):
        if step == stop:
            raise MemoryError
        return rows(self, step)

    with monkeypatch.context() as patch:
        patch.setattr(run_module.StepRows, "__call__", crash)
        with pytest.raises(MemoryError):
            distil(run, quiet())
    distil(run, quiet())
    assert_same_run(tmp_path, finished)


def test_a_crash_after_a_measurement_repeats_it(
    tmp_path, source, prompts, cache, finished, monkeypatch
):
    run = distillation(tmp_path, source, prompts, cache=cache, **MIXED)

    def crash(*arguments):
        if arguments[1] == 4:
            raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr("outrider.train.loop.save_checkpoint", crash)
        with pytest.raises(MemoryError):
            distil(run, quiet())
    entries = json.loads((tmp_path / "measurements.json").read_text())
    assert [entry["step"] for entry in entries] == [0, 4]
    distil(run, quiet())
    assert_same_run(tmp_path, finished)


@pytest.fixture(scope="module")
def processes():
    """Starts processes that have imported everything."""
    return fork_server("tiny_distillation")


def test_kill_9_at_twenty_random_moments(processes, tmp_path, source, prompts, finished):
    """Kills runs with SIGKILL until 20 have been hit, each time going on after the last kill; each
    has a cache of its own, so that answers and probabilities are interrupted, too. Moments are
    drawn from the time that an uninterrupted run takes here."""
    chance = random.Random(7)
    killed = number = 0

    def start():
        folder, cache = tmp_path / str(number), tmp_path / f"cache-{number}"
        process = processes.Process(target=distil_mixture, args=(folder, source, prompts, cache))
        process.start()
        return process, folder

    began = time.monotonic()
    process, folder = start()
    process.join()
    seconds = time.monotonic() - began
    assert_same_run(folder, finished)
    while killed < 20:
        number += 1
        code = None
        while code != 0:
            process, folder = start()
            process.join(chance.uniform(0, seconds) if killed < 20 else None)
            process.kill()
            process.join()
            code = process.exitcode
            assert code in (0, -signal.SIGKILL)
            killed += code != 0
            if (folder / CHECKPOINT).exists():
                torch.load(folder / CHECKPOINT)  # is whole
        assert_same_run(folder, finished)


def test_a_killed_replacement_of_a_folder_is_recovered(tmp_path, source, prompts, cache, finished):
    run = distillation(tmp_path, source, prompts, cache=cache, **MIXED)
    distil(run, quiet())
    (tmp_path / "best").rename(tmp_path / "best.old")  # as a kill between two renames leaves it
    distil(run, quiet())
    assert_same_run(tmp_path, finished)


def test_a_finished_run_is_not_run_again(tmp_path, source, prompts, cache, monkeypatch):
    run = distillation(tmp_path, source, prompts, cache=cache)
    best = distil(run, quiet())
    monkeypatch.setattr(run_module.StepRows, "__call__", lambda *_: pytest.fail("trains"))
    assert distil(run, quiet()) == best


def test_the_draft_is_an_ordinary_folder(finished, source):
    """For Outrider, for transformers, and as the assistant of its generation."""
    engine = outrider.load(
        source, finished / "best", num_speculative_tokens=3, dtype="float32", device="cpu"
    )
    plain = outrider.load(source, method="plain", dtype="float32", device="cpu")
    sampling = outrider.Sampling(temperature=0, max_new_tokens=24, ignore_eos=True)
    result = engine.generate("def f(", sampling)
    assert result.token_ids == plain.generate("def f(", sampling).token_ids
    assert result.stats.drafted > 0
    draft = AutoModelForCausalLM.from_pretrained(finished / "best", dtype=torch.float32)
    words = AutoTokenizer.from_pretrained(finished / "best")
    assert words.chat_template == TEMPLATE
    assert draft.generation_config.eos_token_id == 0
    big = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    inputs = words("def f(", return_tensors="pt")
    asked = {"do_sample": False, "max_new_tokens": 24, "pad_token_id": 0}
    assisted = big.generate(**inputs, assistant_model=draft, **asked)
    assert assisted.tolist() == big.generate(**inputs, **asked).tolist()


def test_the_card_says_what_was_done(finished):
    card = (finished / "best" / "README.md").read_text()
    for words in (
        "# Draft for tiny-target",
        "| target | tiny-target |",
        "forward-kl at temperature 1, over the 8 most probable tokens and the tail",
        "50% target, 50% replay",
        "of 8 steps of 2 rows of 48 tokens",
        "tokens of answers in all",
        "| hours |",
        "| temperature | α | acceptance length |",
        "a command",
    ):
        assert words in card


def test_the_best_checkpoint_is_kept(finished):
    entries = json.loads((finished / "measurements.json").read_text())
    assert [entry["step"] for entry in entries] == [0, 4, 8]
    scores = [sum(at["alpha"] for at in entry["at"]) for entry in entries]
    best = entries[scores.index(max(scores))]
    card = (finished / "best" / "README.md").read_text()
    for at in best["at"]:
        assert (
            f"| {at['temperature']:g} | {at['alpha']:.3f} | {at['acceptance_length']:.2f} |" in card
        )


def test_measured_alpha_is_that_of_the_saved_draft(finished, source, cache):
    """Recomputed from the folder and the cached answers, by plain transformers."""
    from outrider.train.distill.store import read_samples

    entry = json.loads((finished / "measurements.json").read_text())[-1]
    big = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32)
    draft = AutoModelForCausalLM.from_pretrained(finished / "last", dtype=torch.bfloat16)
    (at,) = (at for at in entry["at"] if at["temperature"] == 1.0)
    for path in cache.glob("held_out/*/*/000000.safetensors"):
        contents = json.loads((path.parent / "contents.json").read_text())
        if "temperatures=(1.0,)" in contents["how"]:
            break
    total = count = 0
    for answer in read_samples(path):
        ids = torch.tensor([answer.tokens])
        part = slice(answer.first - 1, -1)
        p_NV = big(ids).logits[0, part].softmax(-1)
        q_NV = draft(ids).logits[0, part].float().softmax(-1)
        total += torch.minimum(p_NV, q_NV).sum().item()
        count += len(p_NV)
    assert at["alpha"] == pytest.approx(total / count, abs=1e-3)
    assert 1 <= at["acceptance_length"] <= 5


@pytest.mark.parametrize("loss", LOSSES)
def test_every_loss_trains(tmp_path, source, prompts, cache, loss):
    best = distil(
        distillation(
            tmp_path, source, prompts, cache=cache, divergence=loss, start=Start(layers=1)
        ),
        quiet(),
    )
    assert 0 < best.score <= 1


@pytest.mark.parametrize("kind", DATA)
def test_every_kind_of_data_trains(tmp_path, source, cache, kind):
    lines = [json.dumps({"prompt": f"print({i})", "answer": f"hello {i}"}) for i in range(20)]
    path = tmp_path / "p.jsonl"
    path.write_text("\n".join(lines))
    run = distillation(tmp_path / "run", source, path, cache=cache, data={"kind": kind})
    assert 0 < distil(run, quiet()).score <= 1


@pytest.mark.parametrize(
    "start", [Start(), Start(layers=2), Start(shape=Shape(1, 16)), Start(cost_ratio=0.6)]
)
def test_every_start_trains(tmp_path, source, prompts, cache, start):
    run = distillation(tmp_path, source, prompts, cache=cache, start=start)
    assert 0 < distil(run, quiet()).score <= 1


def test_an_existing_model_is_trained_on(tmp_path, source, prompts, cache, finished):
    start = Start(folder=finished / "last")
    run = distillation(tmp_path, source, prompts, cache=cache, start=start)
    distil(run, quiet())
    first = json.loads((tmp_path / "measurements.json").read_text())[0]["at"]
    last = json.loads((finished / "measurements.json").read_text())[-1]["at"]
    assert [at["alpha"] for at in first] == [at["alpha"] for at in last]


@pytest.mark.parametrize("num_tokens", [90, 512])
def test_a_model_with_other_tokens_is_no_draft(tmp_path, source, prompts, num_tokens):
    folder = tmp_path / "other"
    tiny_module(vocab_size=num_tokens).save_pretrained(folder)
    from tiny_models import byte_tokenizer

    byte_tokenizer(["something else"], 260).save_pretrained(folder)
    with pytest.raises(VocabularyMismatchError):
        distil(distillation(tmp_path, source, prompts, start=Start(folder=folder)), quiet())


def test_training_with_all_tokens_equals_training_on_the_target_itself(tmp_path, prompts):
    """k = V cached on disk against the target's forward pass in every step."""
    model = target()
    runs = {"cached": model.num_tokens, "live": 0}
    for name, k in runs.items():
        distil(distillation(tmp_path / name, model, prompts, top_k=k), quiet())
    cached, live = (
        [
            at["alpha"]
            for at in json.loads((tmp_path / name / "measurements.json").read_text())[-1]["at"]
        ]
        for name in runs
    )
    assert cached == pytest.approx(live, abs=2e-3)


def test_training_raises_alpha(tmp_path, prompts):
    """A tiny target is imitated by a draft that starts from random weights."""
    model = target()
    run = distillation(
        tmp_path, model, prompts, start=Start(shape=Shape(1, 32)), rows=6, learning_rate=2e-2
    )
    distil(run, quiet())
    scores = [
        sum(at["alpha"] for at in entry["at"])
        for entry in json.loads((tmp_path / "measurements.json").read_text())
    ]
    assert scores[-1] > scores[0] + 0.1


def test_the_target_is_not_trained(tmp_path, prompts):
    model = target()
    before = {name: value.clone() for name, value in model.module.state_dict().items()}
    distil(distillation(tmp_path, model, prompts, top_k=0), quiet())
    assert_same(model.module.state_dict(), before)


def test_bfloat16_resumes_bit_for_bit(tmp_path, source, prompts, cache):
    whole, halved = tmp_path / "whole", tmp_path / "halved"
    settings = {"cache": cache, "train_dtype": torch.bfloat16}
    distil(distillation(whole, source, prompts, **settings), quiet())
    run = distillation(halved, source, prompts, **settings)
    object.__setattr__(run.settings, "until", 4)
    distil(run, quiet())
    distil(distillation(halved, source, prompts, **settings), quiet())
    assert_same(weights(halved), weights(whole))
    assert all(value.dtype == torch.float32 for value in weights(whole).values())


def test_a_loss_that_is_not_finite_keeps_the_last_good_weights(
    tmp_path, source, prompts, cache, monkeypatch
):
    run = distillation(tmp_path, source, prompts, cache=cache)
    good = run_module._objective

    def broken(*arguments):
        objective, calls = good(*arguments), []

        def after_ten_rows(row):
            calls.append(row)
            return objective(row) * (float("nan") if len(calls) > 10 else 1.0)

        return after_ten_rows

    with monkeypatch.context() as patch:
        patch.setattr(run_module, "_objective", broken)
        with pytest.raises(ValueError, match=r"the loss is nan.* at step 5; the weights of step 4"):
            distil(run, quiet())
    assert torch.load(tmp_path / CHECKPOINT)["step"] == 4
    assert all(value.isfinite().all() for value in weights(tmp_path).values())
    assert (tmp_path / "best" / "model.safetensors").exists()
    distil(distillation(tmp_path, source, prompts, cache=cache, learning_rate=1e-3), quiet())
    assert torch.load(tmp_path / CHECKPOINT)["step"] == 8


def test_another_run_in_the_same_folder(tmp_path, source, prompts, cache):
    distil(distillation(tmp_path, source, prompts, cache=cache), quiet())
    with pytest.raises(ValueError, match="holds a run with divergence 'forward-kl', not 'tv'"):
        distil(distillation(tmp_path, source, prompts, cache=cache, divergence="tv"), quiet())


def test_an_empty_corpus(tmp_path, source):
    with pytest.raises(PromptError, match="holds no prompts"):
        distil(distillation(tmp_path, source, prompts_file(tmp_path, [""])), quiet())


def test_a_conversation_for_a_target_without_a_template(tmp_path):
    path = tmp_path / "chat.jsonl"
    path.write_text('[{"role": "user", "content": "hello"}]\n')
    with pytest.raises(PromptError, match=r"line 1|has no chat template"):
        distil(distillation(tmp_path / "run", target(chat=False), path), quiet())


def test_a_target_without_a_tokenizer(tmp_path, prompts):
    from tiny_models import tiny

    with pytest.raises(ModelLoadError, match="has no tokenizer"):
        distil(distillation(tmp_path, tiny(), prompts), quiet())


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"divergence": "hellinger"}, "divergence='hellinger': must be one of forward-kl"),
        ({"temperature": 0.0}, "temperature=0.0: must be above 0"),
        ({"top_k": -1}, "top_k=-1"),
        ({"rows": 0}, "0 rows of 48 tokens"),
        ({"beta": 0.3}, "only divergence='js'"),
        ({"data": {"kind": "dreams"}}, "data='dreams': must be one of ground-truth"),
        ({"data": {"shares": {"draft": 1.0}}}, "only data='mixture' has shares"),
        ({"data": {"kind": "mixture", "shares": {"mixture": 1.0}}}, "of ground-truth, target"),
        ({"data": {"kind": "mixture", "shares": {"target": 0.7}}}, "sum to 0.7"),
        ({"data": {"prompts": None}}, "no prompts: give a file or folder"),
        ({"data": {"refresh_every": 0}}, "refresh_every=0"),
        ({"data": {"answer_temperatures": (-1.0,)}}, "temperature=-1"),
    ],
)
def test_parameters_that_are_none(tmp_path, source, prompts, changes, message):
    with pytest.raises(InvalidParameterError, match=message):
        distil(distillation(tmp_path, source, prompts, **changes), quiet())


def test_two_starts(tmp_path):
    with pytest.raises(InvalidParameterError, match="starts from layers and cost_ratio"):
        Start(layers=2, cost_ratio=0.5)


def test_prompts_that_the_target_writes(tmp_path, source, monkeypatch):
    monkeypatch.setattr("outrider.train.distill.self_prompts.MESSAGE_TOKENS", 16)
    data = {"prompts": None, "self_prompts": 6}
    run = distillation(tmp_path, source, None, data=data, length=100)
    assert 0 < distil(run, quiet()).score <= 1


def test_a_shared_cache_keeps_runs_with_other_prompts_apart(tmp_path, source, cache):
    """The same texts as chat messages and as text: same hashes of the texts, other tokens."""
    path = prompts_file(tmp_path)
    found = {}
    for name, as_text in (("chat", False), ("text", True)):
        run = distillation(tmp_path / name, source, path, cache=cache, data={"as_text": as_text})
        made = data_module.Preparation(
            run, run_module.load_target(source, "cpu", "float32"), target().module, quiet()
        )
        found[name] = made
        samples = made.rows().sources["target"].dataset.samples
        prompts = {prompt.tokens for prompt in made.prompts}
        assert {sample.tokens[: sample.first] for sample in samples} <= prompts
    assert found["chat"].fingerprint != found["text"].fingerprint


def test_samples_are_no_longer_than_the_context(tmp_path):
    """Rows may be: positions begin anew in each of their samples."""
    model = target(max_position_embeddings=64)
    (tmp_path / "texts").mkdir()
    for number in range(3):
        text = "".join(f"print({number}, {line})\n" for line in range(40))
        (tmp_path / "texts" / f"{number}.txt").write_text(text)
    for kind in ("ground-truth", "target"):
        data = {"kind": kind, "answer_tokens": 100, "prompt_tokens": 10}
        run = distillation(
            tmp_path / kind, model, tmp_path / "texts", data=data, length=300, rows=1
        )
        made = data_module.Preparation(run, model, model.module, quiet())
        sizes = made.rows().sources[kind].dataset.sizes
        assert max(sizes) <= 64
        assert 0 < distil(run, quiet()).score <= 1


def test_the_time_of_earlier_sittings_counts(finished):
    class NoRows:
        def state_dict(self):
            return {}

        def load_state_dict(self, state):
            pass

    clock = run_module.Clock(NoRows())
    clock.load_state_dict({"seconds": 1000.0, "rows": {}})
    assert 1000 <= clock.state_dict()["seconds"] < 1100
    assert torch.load(finished / CHECKPOINT)["extra"]["seconds"] > 0

"""Runs of `outrider train-head` on a tiny chat model: hidden states on disk, resuming, errors."""

import json
import shutil
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors import SafetensorError
from tiny_models import byte_tokenizer, greedy, tiny_module
from typer.testing import CliRunner

import outrider
from outrider.core.errors import IncompatibleError, ModelLoadError
from outrider.runtime import load_model
from outrider.train import disk
from outrider.train.disk import DiskFullError
from outrider.train.heads import states as states_module
from outrider.train.heads.batches import StateBatches
from outrider.train.heads.kind import Ground
from outrider.train.heads.kinds import find_kind
from outrider.train.heads.run import HeadRun, run_head
from outrider.train.heads.samples import prompts_of, read_samples, sample_of
from outrider.train.heads.states import States, compute_states
from outrider.train.optim import Schedule

TEMPLATE = (
    "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
OPTIONS = {"draft_vocab_size": 60, "ttt_length": 2}


class Files(NamedTuple):
    target: Path
    data: Path


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    folder = tmp_path_factory.mktemp("chat")
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = TEMPLATE
    module = tiny_module(vocab_size=len(tokenizer), num_hidden_layers=4)
    module.save_pretrained(folder / "target")
    tokenizer.save_pretrained(folder / "target")
    with open(folder / "data.jsonl", "w") as file:
        for i in range(12):
            messages = [
                {"role": "user", "content": f"print {i}"},
                {"role": "assistant", "content": f"def f{i}(x):\n    return x + {i}"},
            ]
            file.write(json.dumps({"messages": messages, "temperature": 0.7}) + "\n")
    return Files(folder / "target", folder / "data.jsonl")


def run(out: Path, files: Files, steps: int = 4, **changes: Any) -> dict[str, torch.Tensor]:
    """Trains for some steps; the weights in the checkpoint."""
    about = HeadRun(
        find_kind("eagle3"),
        files.target,
        files.data,
        OPTIONS,
        num_held_out=2,
        eval_tokens=6,
        dtype="float32",
        **changes,
    )
    schedule = Schedule(1e-3, steps, 1, 1)
    run_head(out, about, schedule, batch_size=3, seed=0, checkpoint_every=2, evaluate_every=3)
    weights: dict[str, torch.Tensor] = torch.load(out / "checkpoint.pt")["model"]
    return weights


@pytest.fixture(scope="module")
def whole(files: Files, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("whole")
    run(out, files)
    return out


def test_a_trained_head_loads_by_its_folder_alone(files: Files, whole: Path) -> None:
    measured = json.loads((whole / "best" / "measured.json").read_text())
    assert measured["step"] in (3, 4)
    assert set(measured["by_temperature"]) == {"0", "1"}
    engine = outrider.load(str(files.target), str(whole / "best"), dtype="float32")
    plain = outrider.load(str(files.target), method="plain", dtype="float32")
    assert engine.method.name == "eagle3"
    found, wanted = (each.generate(["def f", "print"], greedy(12)) for each in (engine, plain))
    assert [r.token_ids for r in found] == [r.token_ids for r in wanted]
    assert found.stats.drafted > 0


def test_a_killed_run_resumes_bit_for_bit(
    files: Files, whole: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The process dies in a step after a checkpoint, and once while hidden states are computed."""
    batch_of = StateBatches.__call__
    shard_of = states_module._shard
    monkeypatch.setattr(states_module, "SHARD_SAMPLES", 4)

    def dying(count: int, function: Any) -> Any:
        calls = iter(range(count))

        def called(*arguments: Any) -> Any:
            if next(calls, None) is None:
                raise MemoryError
            return function(*arguments)

        return called

    with monkeypatch.context() as during:
        during.setattr(states_module, "_shard", dying(1, shard_of))
        with pytest.raises(MemoryError):
            run(tmp_path, files)
    (shard,) = tmp_path.glob("states/*/*.safetensors")
    written = shard.stat().st_mtime_ns
    with monkeypatch.context() as during:
        during.setattr(StateBatches, "__call__", dying(3, batch_of))
        with pytest.raises(MemoryError):
            run(tmp_path, files)
    found = run(tmp_path, files)
    assert shard.stat().st_mtime_ns == written, "a complete shard was computed again"
    wanted = torch.load(whole / "checkpoint.pt")["model"]
    assert all(torch.equal(found[name], wanted[name]) for name in wanted)


def test_a_loss_that_is_not_finite_keeps_the_last_checkpoint(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    batch_of = StateBatches.__call__

    def damaged(self: StateBatches, step: int) -> Any:
        batch = batch_of(self, step)
        if step == 2:
            batch.hidden_BTF.fill_(torch.nan)
        return batch

    monkeypatch.setattr(StateBatches, "__call__", damaged)
    with pytest.raises(ValueError, match="not finite at step 2"):
        run(tmp_path, files)
    assert torch.load(tmp_path / "checkpoint.pt")["step"] == 2


def test_hidden_states_are_those_of_the_target(files: Files, tmp_path: Path) -> None:
    target = load_model(files.target, dtype="float32")
    samples = read_samples(files.data, target.tokenizer, 64)
    states = compute_states(target, samples, (1, 3), tmp_path)
    assert len(states) == len(samples)
    for sample, state in zip(samples, States(states.folder), strict=True):
        assert tuple(state.tokens_T.tolist()) == sample.tokens
        assert tuple(state.answers_T.tolist()) == sample.answers
        with torch.no_grad():
            output = target.module(state.tokens_T[None], output_hidden_states=True)
        close = {"rtol": 1e-2, "atol": 1e-2}
        hidden_TF = torch.cat([output.hidden_states[layer][0] for layer in (1, 3)], -1)
        torch.testing.assert_close(state.hidden_TF.float(), hidden_TF, **close)
        torch.testing.assert_close(state.final_TH.float(), output.hidden_states[4][0], **close)
        torch.testing.assert_close(state.log_norm_T, output.logits[0].logsumexp(-1))


def test_a_full_disk_says_how_much_is_needed(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    usage = shutil.disk_usage(tmp_path)._replace(free=1000)
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: usage)
    with pytest.raises(DiskFullError, match=r"needs \d+\.\d MB more .* 0\.0 MB are free"):
        run(tmp_path, files)


def test_a_disk_that_is_full_when_a_head_is_saved_keeps_the_one_before(
    files: Files, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The library that writes the weights reports it by an error of its own."""
    run(tmp_path, files, steps=3)
    before = (tmp_path / "best" / "model.safetensors").read_bytes()

    def full(*_: Any, **__: Any) -> None:
        raise SafetensorError("I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("outrider.drafters.heads.formats.folder.save_file", full)
    with pytest.raises(DiskFullError, match=r"the head of step 4 needs \d+\.\d MB more"):
        run(tmp_path, files, steps=4)
    assert (tmp_path / "best" / "model.safetensors").read_bytes() == before


def test_answers_are_the_assistants_tokens(files: Files) -> None:
    tokenizer = load_model(files.target).tokenizer
    messages = [
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "def f"},
        {"role": "user", "content": "print"},
        {"role": "assistant", "content": "return x"},
    ]
    sample = sample_of(messages, tokenizer)
    text = tokenizer.decode([t for t, a in zip(sample.tokens, sample.answers, strict=True) if a])
    assert text == "def freturn x"
    assert tokenizer.decode(prompts_of([sample])[0]) == "<user>hello\n<assistant>"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 1: must be a JSON object"),
        ('{"messages": [{"role": "user", "content": "a"}]}', "no message has the role 'assistant'"),
        ('{"messages": [{"role": "assistant"}]}', "must be a string"),
        ("", "nothing to train on"),
    ],
)
def test_bad_data_is_named(files: Files, tmp_path: Path, line: str, message: str) -> None:
    (tmp_path / "bad.jsonl").write_text(line + "\n")
    with pytest.raises(ValueError, match=message):
        read_samples(tmp_path / "bad.jsonl", load_model(files.target).tokenizer, 64)


def test_the_command_line(files: Files, tmp_path: Path) -> None:
    from outrider.cli.app import app

    command = ["train-head", "--target", str(files.target), "--data", str(files.data), "--out"]
    settings = ["--steps", "2", "--held-out", "1", "--measure-tokens", "4", "-o", "ttt_length=1"]
    done = CliRunner().invoke(app, [*command, str(tmp_path / "a"), *settings])
    assert done.exit_code == 0, done.output
    assert (tmp_path / "a" / "best" / "model.safetensors").exists()
    for wrong, message in (
        (["-o", "ttt_lenght=1"], "did you mean 'ttt_length'"),
        (["--kind", "eagle9"], "must be one of eagle3"),
        (["-o", "layers=1,9"], "has layers 1 to 4"),
        (["--held-out", "50"], "too few to keep 50"),
    ):
        failed = CliRunner().invoke(app, [*command, str(tmp_path / "b"), *settings, *wrong])
        assert (failed.exit_code, message in failed.output) == (2, True), failed.output


def test_a_head_of_another_target_is_refused(files: Files, whole: Path) -> None:
    head = whole / "best"
    vocab_size = load_model(files.target).num_tokens
    for settings, message in (
        ({"hidden_size": 64}, "width 32, those of target have 64"),
        ({"vocab_size": vocab_size + 1}, f"vocabulary of {vocab_size} tokens, target has"),
        ({"num_hidden_layers": 1}, "reads layers 1, 2, target has layers 1 to 1"),
    ):
        other = tiny_module(**{"vocab_size": vocab_size, "num_hidden_layers": 4, **settings})
        with pytest.raises((IncompatibleError, ModelLoadError), match=message):
            outrider.load(other, str(head))
    with pytest.raises(IncompatibleError, match=r"cannot draft with .* a head of kind 'eagle3'"):
        outrider.load(str(files.target), str(head), method="speculative")
    with pytest.raises(IncompatibleError, match="drafts with a head"):
        outrider.load(str(files.target), method="eagle3")
    with pytest.raises(IncompatibleError, match="is none"):
        outrider.load(str(files.target), str(files.target), method="eagle3")


def test_a_head_can_be_trained_on(files: Files, whole: Path, tmp_path: Path) -> None:
    """From its folder, which decides its shape and the layers that it reads."""
    target = load_model(files.target, dtype="float32")
    kind = find_kind("eagle3")
    values = kind.values({"start": str(whole / "best"), "draft_vocab_size": 7})
    assert kind.layers(target, values) == (1, 2)
    counts_V = torch.zeros(target.num_tokens, dtype=torch.int64)
    training = kind.build(Ground(target, counts_V, 0), **values)
    assert training.head().vocabulary.size == 60
    training.save(tmp_path)
    assert (tmp_path / "model.safetensors").read_bytes() == (
        whole / "best" / "model.safetensors"
    ).read_bytes()

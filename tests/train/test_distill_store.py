"""Shards on disk: what is read is what was written, and a full disk leaves whole shards."""

import errno
from collections import namedtuple

import pytest
import torch
from tiny_distillation import distillation, prompts_file, quiet, target
from tiny_models import VOCAB, ragged_prompts, tiny_module
from transformers import AutoModelForCausalLM

from outrider.runtime.hf.fingerprint import fingerprint
from outrider.train import disk
from outrider.train.disk import DiskFullError
from outrider.train.distill import store
from outrider.train.distill.answers import Answering, plain_engine, target_answers
from outrider.train.distill.prompts import Reader
from outrider.train.distill.run import distil
from outrider.train.distill.sample import Sample
from outrider.train.distill.scoring import Scorer
from outrider.train.distill.store import (
    Dataset,
    folder_for,
    read_samples,
    shard_path,
    write_samples,
)

LENGTHS = [5 + number % 17 for number in range(150)]


def samples():
    return [
        Sample(tuple(tokens), 1 + number % 4)
        for number, tokens in enumerate(ragged_prompts(LENGTHS))
    ]


def scorer(**settings):
    chosen = {"k": 6, "temperature": 1.0, "width": VOCAB, "capacity": 64} | settings
    return Scorer(tiny_module(), **chosen)


def test_samples_are_read_as_they_were_written(tmp_path):
    write_samples(tmp_path / "a.safetensors", samples())
    assert read_samples(tmp_path / "a.safetensors") == samples()
    write_samples(tmp_path / "none.safetensors", [])
    assert read_samples(tmp_path / "none.safetensors") == []
    assert [path.suffix for path in tmp_path.iterdir()] == [".safetensors"] * 2


def test_cached_cells_are_those_of_the_target(tmp_path):
    """Across shards, whose samples were packed with others."""
    dataset = scorer().cached(samples(), tmp_path)
    alone = scorer(capacity=2)
    alone.capacity = 0
    assert len(list(tmp_path.iterdir())) == 3
    for index in (0, 63, 64, 100, 149):
        (expected,) = alone.cells([samples()[index]])
        found = dataset[index]
        assert found.tokens == samples()[index].tokens
        assert len(found.cells) == found.num_positions
        assert torch.equal(found.cells.ids_Nk, expected.ids_Nk)
        torch.testing.assert_close(found.cells.log_p_NC, expected.log_p_NC, atol=1e-4, rtol=1e-4)


def test_cells_belong_to_the_position_that_predicts_the_token(tmp_path):
    """Fails for cells of the position before or after."""
    model, sample = tiny_module(), Sample(tuple(ragged_prompts((9,))[0]), 3)
    (cells,) = Scorer(model, VOCAB, 1.0, VOCAB, 64).cells([sample])
    log_p_TV = model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
    expected_N = log_p_TV[2:-1].gather(1, torch.tensor(sample.tokens[3:])[:, None])[:, 0]
    at_N1 = (cells.ids_Nk == torch.tensor(sample.tokens[3:])[:, None]).int().argmax(1, keepdim=True)
    torch.testing.assert_close(cells.log_p_NC.gather(1, at_N1)[:, 0], expected_N)


def test_an_interrupted_cache_goes_on_after_its_shards(tmp_path, monkeypatch):
    made = scorer()
    for name in ("whole", "halted"):
        (tmp_path / name).mkdir()
    whole = scorer().cached(samples(), tmp_path / "whole")
    written = []
    cells = made.cells

    def interrupted(chunk):
        if len(written) == 2:
            raise KeyboardInterrupt
        written.append(chunk)
        return cells(chunk)

    monkeypatch.setattr(made, "cells", interrupted)
    with pytest.raises(KeyboardInterrupt):
        made.cached(samples(), tmp_path / "halted")
    written.pop()  # allows one more
    again = made.cached(samples(), tmp_path / "halted")
    assert len(written) == 2
    assert torch.equal(again[149].cells.log_p_NC, whole[149].cells.log_p_NC)


def test_folders_depend_on_everything_that_matters(tmp_path):
    one = folder_for(tmp_path, target="a", k=4, temperature=1.0)
    assert folder_for(tmp_path, target="a", k=4, temperature=1.0) == one
    others = ({"k": 5}, {"temperature": 0.5}, {"target": "b"})
    folders = [
        folder_for(tmp_path, **{"target": "a", "k": 4, "temperature": 1.0} | o) for o in others
    ]
    assert len({one, *folders}) == 4
    assert '"k": 4' in (one / "contents.json").read_text()


def test_another_model_has_another_fingerprint():
    one = tiny_module()
    assert fingerprint(one) == fingerprint(tiny_module())
    assert fingerprint(one) != fingerprint(tiny_module(seed=1))
    with torch.no_grad():
        one.lm_head.weight[3, 0] += 1
    assert fingerprint(one) != fingerprint(tiny_module())


def test_a_model_that_was_moved_has_the_same_fingerprint(tmp_path):
    tiny_module().save_pretrained(tmp_path / "here")
    (tmp_path / "there").mkdir()
    for file in (tmp_path / "here").iterdir():
        (tmp_path / "there" / file.name).write_bytes(file.read_bytes())
    models = [
        AutoModelForCausalLM.from_pretrained(tmp_path / name, dtype="float32")
        for name in ("here", "there")
    ]
    assert models[0].config._name_or_path != models[1].config._name_or_path
    assert fingerprint(models[0]) == fingerprint(models[1])


def test_a_disk_without_room_is_reported_before_anything_is_written(tmp_path, monkeypatch):
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage(9e9, 9e9, 1_100_000))
    positions = sum(sample.num_positions for sample in samples())
    needed = 8 * 7 * positions / 1e6
    with pytest.raises(DiskFullError, match=rf"needs {needed:.1f} MB more .* 1.1 MB are free"):
        scorer().cached(samples(), tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_disk_that_becomes_full_leaves_whole_shards(tmp_path, monkeypatch):
    save, saved = store.save_file, []

    def full_after_one(tensors, path):
        if saved:
            path.write_bytes(b"torn")
            raise OSError(errno.ENOSPC, "No space left on device")
        saved.append(path)
        save(tensors, path)

    monkeypatch.setattr(store, "save_file", full_after_one)
    with pytest.raises(DiskFullError, match=r"needs .* lower --top-k"):
        scorer().cached(samples(), tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["000000.safetensors"]
    monkeypatch.setattr(store, "save_file", save)
    dataset = scorer().cached(samples(), tmp_path)
    assert len(dataset[149].cells) == dataset[149].num_positions


def test_a_full_disk_leaves_the_checkpoint_of_the_run(tmp_path, monkeypatch):
    """A finished run whose prompts grow needs a new cache, for which there is no room."""
    run = distillation(tmp_path / "run", target(), prompts_file(tmp_path))
    distil(run, quiet())
    before = (tmp_path / "run" / "checkpoint.pt").read_bytes()
    prompts_file(tmp_path, [f"more {i}" for i in range(30)])
    usage = namedtuple("usage", "total used free")
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda path: usage(9, 9, 0))
    with pytest.raises(DiskFullError, match="is intact, the last checkpoint too"):
        distil(run, quiet())
    assert (tmp_path / "run" / "checkpoint.pt").read_bytes() == before


def test_a_dataset_without_cells_has_its_samples():
    dataset = Dataset(samples(), None)
    assert dataset[7] == samples()[7]
    assert dataset.num_positions == sum(sample.num_positions for sample in samples())


def test_answers_are_the_targets_samples(tmp_path):
    """Each answered at each temperature; at temperature 0 as greedy decoding answers."""
    model = target()
    read = Reader(model.tokenizer, "target")
    prompts = [read.encode(f"print({i})") for i in range(5)]
    how = Answering((0.0, 1.0), max_tokens=9, length=64, seed=3)
    found = target_answers(plain_engine(model, 4), prompts, how, tmp_path)
    assert len(found) == 10
    greedy = found[::2]
    for prompt, sample in zip(prompts, greedy, strict=True):
        assert sample.tokens[: sample.first] == prompt.tokens
        ids = torch.tensor([sample.tokens])
        picked = model.module(ids).logits[0].argmax(-1)[sample.first - 1 : -1]
        assert tuple(picked.tolist()) == sample.tokens[sample.first :]
        assert 1 <= sample.num_positions <= 9
    assert [s.tokens for s in greedy] != [s.tokens for s in found[1::2]]


def test_answers_do_not_depend_on_the_batch(tmp_path):
    model = target()
    read = Reader(model.tokenizer, "target")
    prompts = [read.encode(f"print({i})") for i in range(6)]
    how = Answering((1.0,), max_tokens=9, length=64, seed=3)
    folders = [folder_for(tmp_path, size=size) for size in (1, 6)]
    one, six = (
        target_answers(plain_engine(model, size), prompts, how, folder)
        for size, folder in zip((1, 6), folders, strict=True)
    )
    assert one == six


def test_long_prompts_are_left_out_and_long_answers_cut(tmp_path):
    model = target()
    read = Reader(model.tokenizer, "target")
    prompts = [read.encode("x"), read.encode("print(hello world) " * 20)]
    length = len(prompts[0].tokens) + 3
    how = Answering((1.0,), max_tokens=50, length=length)
    (sample,) = target_answers(plain_engine(model, 4), prompts, how, tmp_path)
    assert sample.num_inputs <= length
    assert shard_path(tmp_path, 0).exists()

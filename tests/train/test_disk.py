"""A full disk leaves the last checkpoint, and the message says how much is needed."""

from collections import namedtuple

import pytest
import torch
from tiny_models import tiny_module

from outrider.train import disk
from outrider.train.checkpoint import CHECKPOINT, load_checkpoint, save_checkpoint
from outrider.train.disk import DiskFullError, tensor_bytes, writing
from outrider.train.optim import build_adamw

Usage = namedtuple("Usage", "total used free")


def free(monkeypatch, num_bytes):
    monkeypatch.setattr(disk.shutil, "disk_usage", lambda folder: Usage(9, 9, num_bytes))


def test_tensors_are_counted_wherever_they_are():
    assert tensor_bytes({"a": [torch.zeros(3)], "b": (torch.zeros(2).double(), 7), "c": "x"}) == 28


def test_a_checkpoint_that_does_not_fit_leaves_the_last_one(tmp_path, monkeypatch):
    model = tiny_module()
    optimizers = build_adamw(model, 1e-3)
    save_checkpoint(tmp_path, 4, model, optimizers, {})
    before = (tmp_path / CHECKPOINT).read_bytes()
    size = tensor_bytes(model.state_dict())
    free(monkeypatch, size // 2)
    with pytest.raises(
        DiskFullError, match=rf"checkpoint of step 8 needs {size / 1e6:.1f} MB more"
    ):
        save_checkpoint(tmp_path, 8, model, optimizers, {})
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]
    assert (tmp_path / CHECKPOINT).read_bytes() == before
    assert load_checkpoint(tmp_path, model, optimizers, {}) == 4


def test_a_disk_that_becomes_full_while_a_checkpoint_is_written(tmp_path, monkeypatch):
    model = tiny_module()
    save_checkpoint(tmp_path, 4, model, [], {})
    before = (tmp_path / CHECKPOINT).read_bytes()

    def torn(state, file):
        file.write(b"half a checkpoint")
        free(monkeypatch, 0)
        raise RuntimeError("PytorchStreamWriter failed writing file data/3: file write failed")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(DiskFullError, match=r"where 0\.0 MB are free; free some"):
        save_checkpoint(tmp_path, 8, model, [], {})
    assert [path.name for path in tmp_path.iterdir()] == [CHECKPOINT]
    assert (tmp_path / CHECKPOINT).read_bytes() == before


@pytest.mark.parametrize("content", [b"", b"junk", b"PK\x03\x04 cut short"])
def test_a_checkpoint_that_is_damaged(tmp_path, content):
    (tmp_path / CHECKPOINT).write_bytes(content)
    with pytest.raises(ValueError, match=r"checkpoint\.pt is damaged.* --fresh to start over"):
        load_checkpoint(tmp_path, tiny_module(), [], {})


def test_other_errors_stay_as_they_are(tmp_path):
    partial = tmp_path / "x.partial"

    def fails():
        with writing(partial, 5, "x", "y"):
            partial.write_text("half")
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert not partial.exists()

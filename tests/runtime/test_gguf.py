"""GGUF files as models: converted once, cached, and refused with a reason where they cannot be."""

import json
from pathlib import Path

import pytest
import torch
from tiny_models import tiny_module
from transformers import LlamaForCausalLM

from outrider.core.errors import ModelLoadError, UnsupportedModelError
from outrider.runtime import load_model
from outrider.runtime.hf import gguf as gguf_files
from outrider.runtime.hf.gguf import folder_of

gguf = pytest.importorskip("gguf", reason="needs the extra gguf")
pytest.importorskip("accelerate", reason="needs the extra gguf")

TOKENS = ["a", "b", "ab", "<|endoftext|>", "<|im_end|>"]


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def module() -> LlamaForCausalLM:
    return tiny_module(seed=1)


@pytest.fixture
def file(tmp_path: Path, module: LlamaForCausalLM) -> Path:
    """A tiny Llama of float32 weights."""
    from benchmarks.peer_workers.gguf_export import export

    folder = tmp_path / "model"
    module.save_pretrained(folder)
    vocabulary = {token: number for number, token in enumerate(TOKENS)}
    special = [{"id": vocabulary[token], "content": token} for token in TOKENS[3:]]
    model = {"vocab": vocabulary, "merges": [["a", "b"]]}
    (folder / "tokenizer.json").write_text(json.dumps({"added_tokens": special, "model": model}))
    config = json.loads((folder / "config.json").read_text()) | {"eos_token_id": 4}
    (folder / "config.json").write_text(json.dumps(config))
    export(folder, tmp_path / "tiny.gguf")
    return tmp_path / "tiny.gguf"


def message_of(file: Path, kind: type[Exception] = ModelLoadError) -> str:
    with pytest.raises(kind) as caught:
        load_model(file, role="draft")
    message = str(caught.value)
    assert message.startswith(f"cannot load draft {str(file)!r}: ")
    return message


def partial_folders(tmp_path: Path) -> list[Path]:
    return [path for path in (tmp_path / "cache" / "gguf").iterdir() if path.name[0] == "."]


def test_a_gguf_file_computes_what_the_model_computes(file: Path, module: LlamaForCausalLM) -> None:
    model = load_model(str(file), dtype="float32")
    ids_BT = torch.tensor([[5, 17, 42, 8]])
    assert torch.equal(model.module(ids_BT).logits, module(ids_BT).logits)


def test_both_end_tokens_end_a_sequence(file: Path) -> None:
    """A file names one end token; the other one its vocabulary has."""
    model = load_model(file, dtype="float32")
    assert model.generation_config is not None
    assert model.generation_config.eos_token_id == [4, 3]
    assert model.tokenizer is not None
    assert model.tokenizer.encode("ab") == [2]


def test_a_file_is_converted_once_and_again_when_it_changes(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")
    calls = []

    def convert(file: Path, folder: Path) -> None:
        calls.append(file)
        (folder / "config.json").write_text("{}")

    first = folder_of(file, "target", convert)
    assert folder_of(file, "target", convert) == first
    assert calls == [file]
    file.write_bytes(b"GGUF, another one")
    assert folder_of(file, "target", convert) != first
    assert len(calls) == 2
    assert partial_folders(tmp_path) == []


def test_another_process_may_be_first(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")

    def faster(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("[]")

    def convert(file: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        folder_of(file, "target", faster)

    assert (folder_of(file, "target", convert) / "config.json").read_text() == "[]"
    assert partial_folders(tmp_path) == []


def test_a_full_disk_leaves_nothing_and_says_how_much_is_needed(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"GGUF")

    def convert(file: Path, folder: Path) -> None:
        (folder / "half").write_text("x")
        raise OSError(28, "No space left on device")

    with pytest.raises(ModelLoadError, match=r"No space left.*GiB: make room.*OUTRIDER_CACHE"):
        folder_of(file, "target", convert)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_a_file_that_is_no_gguf_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "x.gguf"
    file.write_bytes(b"PK\x03\x04")
    assert "does not begin as GGUF files do" in message_of(file)


def test_a_damaged_file_is_refused(file: Path, tmp_path: Path) -> None:
    file.write_bytes(file.read_bytes()[:600])
    assert "get it again" in message_of(file)
    assert list((tmp_path / "cache" / "gguf").iterdir()) == []


def test_an_unknown_architecture_is_named(tmp_path: Path) -> None:
    writer = gguf.GGUFWriter(tmp_path / "x.gguf", "ouroboros")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    message = message_of(tmp_path / "x.gguf", UnsupportedModelError)
    assert "ouroboros is not supported" in message
    assert "safetensors" in message


def test_missing_packages_are_named(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(file: Path) -> torch.dtype:
        raise ImportError("No module named 'gguf'")

    monkeypatch.setattr(gguf_files, "stored_dtype", missing)
    assert "pip install 'outrider[gguf]'" in message_of(file)

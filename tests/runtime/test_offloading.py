"""Weights that stay on disk: the same tokens, and errors for what cannot be offloaded."""

from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import byte_tokenizer, engine_of, greedy, ragged_prompts, tiny_module, token_ids

from outrider.core.errors import IncompatibleError, UnsupportedModelError
from outrider.runtime import load_model
from outrider.runtime.hf.layout import DeviceMap, OffloadedModel

pytest.importorskip("accelerate")

PROMPTS = ragged_prompts([9, 3, 17])
ON_DISK = {
    "model.embed_tokens": "cpu",
    "model.layers.0": "disk",
    "model.layers.1": "cpu",
    "model.norm": "cpu",
    "model.rotary_emb": "cpu",
    "lm_head": "disk",
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("model")
    tiny_module(std=0.2, dtype=torch.float64, vocab_size=280).save_pretrained(folder)
    byte_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize("placement", [ON_DISK, "auto"])
def test_tokens_are_those_of_the_whole_model(folder: Path, placement: Any, tmp_path: Path) -> None:
    layout = DeviceMap(placement, folder=tmp_path)
    target = load_model(folder, dtype="float64", device="cpu", layout=layout)
    whole = load_model(folder, dtype="float64", device="cpu")
    draft = load_model(folder, dtype="float64", device="cpu")
    assert isinstance(target, OffloadedModel)
    on_disk = {each.device.type for each in target.module.parameters()}
    assert ("meta" in on_disk) == (placement == ON_DISK)
    found = engine_of(target, draft).generate(PROMPTS, greedy(9))
    assert token_ids(found) == token_ids(engine_of(whole).generate(PROMPTS, greedy(9)))


def test_layers_on_several_gpus_are_refused(folder: Path) -> None:
    module = load_model(folder, device="cpu").module
    module.hf_device_map = {"model.layers.0": 0, "model.layers.1": 1}
    with pytest.raises(UnsupportedModelError, match=r"layers on 2 devices.*torchrun"):
        OffloadedModel(module, name="target")


def test_what_cannot_be_offloaded(folder: Path) -> None:
    with pytest.raises(IncompatibleError, match="offloaded and quantized"):
        load_model(folder, quantized="int8", layout=DeviceMap())
    with pytest.raises(IncompatibleError, match="in memory already"):
        load_model(load_model(folder), layout=DeviceMap())

"""What is exported has the numbers that a model loaded in bfloat16 has."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from outrider.train.export import in_bfloat16
from outrider.train.models import Architecture, build_llama


def test_the_frequencies_of_rotary_embeddings_are_not_rounded(tmp_path: Path) -> None:
    """``model.bfloat16()`` would round them, and so make another model."""
    shape = Architecture(16, 24, 32, 1, 2, 1, 32)
    model = build_llama(shape, 0)
    exact = model.model.rotary_emb.inv_freq.clone()
    assert not torch.equal(exact.bfloat16().float(), exact)
    model.save_pretrained(tmp_path)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    found = in_bfloat16(model)
    assert torch.equal(found.model.rotary_emb.inv_freq, exact)
    for name, parameter in loaded.named_parameters():
        assert torch.equal(parameter, found.get_parameter(name)), name

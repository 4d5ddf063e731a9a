"""The benchmark of early exit: measured passes, the page and the prompts."""

import json

import torch
from tiny_models import ragged_prompts, tiny

from benchmarks.early_exit import acceptance, code_prompts, markdown, measure
from outrider import assets
from outrider.runtime import load_model
from outrider.runtime.hf.early_exit import EarlyExit


def test_passes_are_timed_and_reported() -> None:
    module = tiny(num_hidden_layers=4)
    widths: list[int] = []
    target = EarlyExit(module, 1)
    norm = target.module.model.layers[0].input_layernorm
    norm.register_forward_hook(lambda part, inputs, output: widths.append(output.shape[1]))
    size = measure(target, ragged_prompts([5, 5]), 3, 2)
    assert (size["B"], size["gamma"], size["exit"], size["layers"]) == (2, 3, 1, 4)
    assert widths.count(4) == 1 + 2 + 3  # prefill, and the whole passes alone
    found = [acceptance(module, ragged_prompts([4]), t) for t in (0.0, 1.0)]
    about = dict.fromkeys(
        ("date", "hardware", "threads", "dtype", "torch", "repeats", "command", "note"), "x"
    )
    report = {"about": about, "sizes": [size], "acceptance": found}
    page = markdown(report)
    assert "| 2 | 3 | 1 + 3 |" in page
    assert json.loads(json.dumps(report)) == report


def test_prompts_have_equal_lengths_and_differ() -> None:
    target = load_model(assets.target_path(), dtype="float32")
    with torch.inference_mode():
        prompts = code_prompts(target, 3)
    assert {len(prompt) for prompt in prompts} == {256}
    assert prompts[0] != prompts[1]

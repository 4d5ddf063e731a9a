"""α, bits per byte and sampling, each against its definition or a reference."""

import math

import pytest
import torch

from outrider.train.evaluate import (
    acceptance,
    acceptance_along,
    bits_per_byte,
    evaluate_pair,
    sample_rows,
)
from outrider.train.models import Architecture, build_llama

TINY = Architecture(32, 16, 24, num_hidden_layers=1, num_attention_heads=2, num_key_value_heads=1)


def test_acceptance_is_one_minus_total_variation():
    p_NV = torch.tensor([[0.5, 0.3, 0.2], [1.0, 1e-30, 1e-30]])
    q_NV = torch.tensor([[0.2, 0.5, 0.3], [0.25, 0.5, 0.25]])
    torch.testing.assert_close(acceptance(p_NV.log(), q_NV.log(), 1.0), torch.tensor([0.7, 0.25]))
    assert acceptance(p_NV.log(), q_NV.log(), 0.0).tolist() == [0.0, 0.0]
    assert acceptance(p_NV.log(), p_NV.log(), 0.0).tolist() == [1.0, 1.0]


def test_bits_per_byte():
    assert bits_per_byte(math.log(2), num_tokens=10, num_bytes=40) == pytest.approx(0.25)


def test_greedy_samples_equal_generate():
    model = build_llama(TINY, seed=0).eval()
    prompts_BT = torch.randint(1, 32, (3, 5), generator=torch.Generator().manual_seed(0))
    ours_BT = sample_rows(model, prompts_BT, 8, temperature=0.0, seed=0)
    model.generation_config.eos_token_id = None
    theirs_BT = model.generate(prompts_BT, max_new_tokens=8, do_sample=False)
    assert torch.equal(ours_BT, theirs_BT)


def test_a_model_accepts_all_of_its_own_tokens():
    model = build_llama(TINY, seed=0).eval()
    rows_BT = torch.randint(0, 32, (2, 40), generator=torch.Generator().manual_seed(0))
    assert acceptance_along(model, model, rows_BT, 1.0) == pytest.approx(1.0)
    report = evaluate_pair(model, model, rows_BT, prompt_tokens=8, num_tokens=8)
    for alphas in (report.alpha_text, report.alpha_samples):
        assert set(alphas) == {0.0, 0.7, 1.0}
        assert min(alphas.values()) == pytest.approx(1.0)
    assert report.cost_ratio > 0

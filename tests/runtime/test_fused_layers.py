"""Layers that run by fewer kernels: which are replaced, and that models compute the same."""

import copy
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from gpu_here import DEVICE, DTYPES, NEEDS_TRITON
from tiny_models import FAMILIES, full_logits, with_various_norms
from torch import nn

from outrider.core.errors import OutriderWarning
from outrider.runtime import HFModel
from outrider.runtime.executors.traced import ChainForward, NodesForward
from outrider.runtime.executors.traced_cache import halves
from outrider.runtime.kernels import fused_layers
from outrider.runtime.kernels.fused_layers import use_fused_layers
from outrider.runtime.kernels.joined_linears import can_join, join, joined_linear

TOKENS = [3, 1, 4, 1, 5, 9, 2, 6]
HAVE = {
    "llama": (2, 2, 2),
    "qwen3": (2, 2, 2),
    "mistral": (2, 2, 2),
    "mixtral": (0, 2, 0),
    "gemma2": (2, 0, 0),  # its attention caps scores
    "gemma3": (3, 3, 0),  # its decoder layers have four norms
}
"""How many MLPs, attention layers and decoder layers of a family are replaced; of others none."""


def varied(family: str, dtype: torch.dtype) -> Any:
    return with_various_norms(family, dtype).to(DEVICE).eval()


@NEEDS_TRITON
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
def test_models_compute_the_same(family: str, dtype: torch.dtype) -> None:
    from outrider.runtime.kernels.fused_attention import use_fused_attention
    from outrider.runtime.kernels.fused_mlp import use_fused_mlps
    from outrider.runtime.kernels.fused_residuals import use_fused_residuals

    module = varied(family, dtype)
    wanted_TV = full_logits(module, TOKENS).double()
    replaced = use_fused_mlps(module), use_fused_attention(module), use_fused_residuals(module)
    assert replaced == HAVE.get(family, (0, 0, 0))
    error_TV = full_logits(module, TOKENS).double() - wanted_TV
    allowed = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 0.03}[dtype]
    assert float(error_TV.norm() / wanted_TV.norm()) < allowed
    state = module.state_dict()
    assert all(torch.equal(state[name], each) for name, each in module.named_parameters())


@NEEDS_TRITON
def test_layers_of_models_in_float64_stay() -> None:
    """The kernels compute in float32."""
    module = varied("llama", torch.float64)
    wanted_TV = full_logits(module, TOKENS)
    use_fused_layers(module, "tiny")
    assert torch.equal(full_logits(module, TOKENS), wanted_TV)


@NEEDS_TRITON
def test_training_runs_the_model_s_own_code() -> None:
    module, own = (varied("llama", torch.float32) for _ in range(2))
    use_fused_layers(module, "tiny")
    tokens = torch.tensor([TOKENS], device=DEVICE)
    for each in (module, own):
        each(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    for mine, theirs in zip(module.parameters(), own.parameters(), strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-5)


@NEEDS_TRITON
@torch.no_grad()
def test_copies_read_their_own_weights() -> None:
    module = varied("llama", torch.float32)
    use_fused_layers(module, "tiny")
    twin, wanted_TV = copy.deepcopy(module), full_logits(module, TOKENS)
    assert torch.equal(full_logits(twin, TOKENS), wanted_TV)
    for layer in twin.model.layers:
        layer.self_attn.v_proj.weight.zero_()
        layer.mlp.up_proj.weight.zero_()
    assert torch.equal(full_logits(module, TOKENS), wanted_TV)
    embedded = twin.model.norm(twin.model.embed_tokens(torch.tensor([TOKENS], device=DEVICE)))
    assert torch.equal(full_logits(twin, TOKENS), twin.lm_head(embedded)[0].cpu())


@NEEDS_TRITON
@torch.no_grad()
@pytest.mark.parametrize("family", ["llama", "qwen3"])
@pytest.mark.parametrize("kind", [ChainForward, NodesForward])
def test_passes_over_kv_buffers(kind: type[ChainForward], family: str) -> None:
    """Their logits, and what they write."""
    model = HFModel(varied(family, torch.float32))
    forward = kind(model.module, model.spec)
    buffers = halves(model.example_cache().in_use())
    found = []
    for _ in range(2):
        *moving, keys, values = forward.inputs(buffers, rows=3, queries=4, span=9, slots=12)
        earlier = torch.arange(36, device=DEVICE).view(3, 12) % 97
        forward.fill(earlier, keys, values)
        logits_BNV, health_B = forward(*moving, keys, values)
        found.append([logits_BNV, health_B, *keys, *values])
        use_fused_layers(model.module, "tiny")
    for before, after in zip(*found, strict=True):
        torch.testing.assert_close(after, before, rtol=1e-4, atol=1e-4)
    assert not torch.equal(found[0][0], found[1][0])  # other kernels round otherwise


class SoftlyCapped(nn.Module):
    """What Llama's attention would be with a cap that its method alone knows of."""

    def forward(self, *arguments: Any, **kwargs: Any) -> Any:
        return super().forward(*arguments, **kwargs, softcap=50.0)


@NEEDS_TRITON
@torch.no_grad()
def test_layers_with_hooks_call_them() -> None:
    from outrider.runtime.kernels.fused_attention import use_fused_attention
    from outrider.runtime.kernels.fused_mlp import use_fused_mlps
    from outrider.runtime.kernels.fused_residuals import use_fused_residuals

    module, called = varied("llama", torch.float32), []
    first, second = module.model.layers
    for part in (first.mlp, first.self_attn.k_proj, second.post_attention_layernorm):
        part.register_forward_hook(lambda part, *_: called.append(part))
    counts = use_fused_mlps(module), use_fused_attention(module), use_fused_residuals(module)
    assert counts == (2, 1, 0)
    called.clear()
    full_logits(module, TOKENS)
    assert called == [first.self_attn.k_proj, first.mlp, second.post_attention_layernorm]


@NEEDS_TRITON
def test_attention_with_other_arguments_stays() -> None:
    from outrider.runtime.kernels.fused_attention import use_fused_attention

    module = varied("llama", torch.float32)
    layer = module.model.layers[0].self_attn
    layer.__class__ = type("Capped", (SoftlyCapped, type(layer)), {})
    assert use_fused_attention(module) == 1


def test_a_compiler_that_fails_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(*_: object) -> torch.Tensor:
        raise RuntimeError("no C compiler\nat all")

    kernels = SimpleNamespace(normed=fails, ADDED=(0.0,))
    monkeypatch.setattr(fused_layers, "find_spec", lambda _: True)
    monkeypatch.setitem(sys.modules, "outrider.runtime.kernels.gpu_kernels", kernels)
    module = varied("llama", torch.float32)
    wanted_TV = full_logits(module, TOKENS)
    with pytest.warns(OutriderWarning, match=r"tiny runs by torch's own kernels.*no C compiler$"):
        use_fused_layers(module, "tiny")
    torch.testing.assert_close(full_logits(module, TOKENS), wanted_TV)


def linears(*sizes: int, bias: bool = True) -> list[nn.Linear]:
    return [nn.Linear(6, size, bias) for size in sizes]


@pytest.mark.parametrize("bias", [True, False])
def test_joined_layers_are_side_by_side(bias: bool) -> None:
    layers, x = linears(4, 2, 2, bias=bias), torch.randn(3, 6)
    wanted = torch.cat([layer(x) for layer in layers], -1)
    assert can_join(layers)
    for _ in range(2):
        join(layers)
        torch.testing.assert_close(joined_linear(x, layers), wanted)
    places = [layer.weight.data_ptr() for layer in layers]
    assert places[1] - places[0] == layers[0].weight.nbytes
    with torch.no_grad():
        layers[1].weight.mul_(2)  # in place, so that they stay together
    torch.testing.assert_close(joined_linear(x, layers)[:, 4:6], layers[1](x))
    layers[1].weight = nn.Parameter(torch.zeros(2, 6))
    torch.testing.assert_close(joined_linear(x, layers)[:, 4:6], layers[1](x))


def test_other_layers_are_not_joined() -> None:
    plain, other = linears(4, 4)
    assert can_join([plain, other])
    assert not can_join([plain, None])
    assert not can_join([plain, nn.Linear(7, 4)])
    assert not can_join([plain, nn.Linear(6, 4, bias=False)])
    assert not can_join([plain, nn.Linear(6, 4).double()])
    assert not can_join([plain, nn.LayerNorm(6)])
    other.register_forward_hook(lambda *_: None)
    assert not can_join([plain, other])

"""What a draft starts from: layers of the target, or a new model of a given cost."""

import pytest
import torch
from tiny_models import FAMILIES, tiny, tiny_module
from torch import nn
from transformers import AutoModelForCausalLM

from outrider.core.errors import InvalidParameterError
from outrider.train.distill.shape import Shape, parameters_read, shape_for_cost
from outrider.train.distill.start import evenly_spaced, from_layers, from_scratch
from outrider.train.models import num_parameters

DEEP = {
    "gpt2": {"n_layer": 5},
    "gemma3": {
        "num_hidden_layers": 5,
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["sliding_attention"],
    },
}
TOKENS_BT = torch.arange(2, 26).view(2, 12)


def deep(family):
    return tiny_module(family, **DEEP.get(family, {"num_hidden_layers": 5}))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_draft_of_some_layers_skips_the_others(family, tmp_path):
    """Its logits are those of the target whose other layers are taken out of the list."""
    target = deep(family)
    draft = from_layers(target, (0, 3, 4))
    found_BTV = draft(TOKENS_BT).logits
    for name, module in target.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) == 5:
            holder, _, attribute = name.rpartition(".")
            kept = nn.ModuleList([module[layer] for layer in (0, 3, 4)])
            setattr(target.get_submodule(holder), attribute, kept)
            break
    target.config = draft.config
    for module in target.modules():
        if getattr(module, "config", None) is not None:
            module.config = draft.config
    torch.testing.assert_close(found_BTV, target(TOKENS_BT, use_cache=False).logits)
    draft.save_pretrained(tmp_path)
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    torch.testing.assert_close(again(TOKENS_BT).logits, found_BTV)


def test_dropout_is_off():
    target = deep("gpt2")
    target.config.resid_pdrop = 0.5
    draft = from_layers(target, (0, 3))
    assert draft.config.resid_pdrop == 0.5
    assert not any(part.training for part in draft.modules())
    new = from_scratch(tiny_module(), Shape(1, 16), seed=0)
    assert not any(part.training for part in new.modules())


def test_layer_types_follow_their_layers():
    draft = from_layers(deep("gemma3"), (1, 2))
    assert draft.config.layer_types == ["full_attention", "sliding_attention"]


def test_all_layers_give_the_target_in_float32():
    target = deep("llama")
    for parameter in target.parameters():
        parameter.data = parameter.data.bfloat16()
    draft = from_layers(target, range(5))
    assert draft.dtype == torch.float32
    for parameter in target.parameters():
        parameter.data = parameter.data.float()
    torch.testing.assert_close(draft(TOKENS_BT).logits, target(TOKENS_BT).logits)


def test_the_target_is_not_changed():
    target = deep("llama")
    before = {name: value.clone() for name, value in target.state_dict().items()}
    draft = from_layers(target, (0, 4))
    with torch.no_grad():
        for parameter in draft.parameters():
            parameter.zero_()
    assert target.config.num_hidden_layers == 5
    assert all(torch.equal(before[name], value) for name, value in target.state_dict().items())


@pytest.mark.parametrize("layers", [(), (3, 1), (1, 1), (0, 5), (-1, 2)])
def test_layers_that_the_target_does_not_have(layers):
    with pytest.raises(InvalidParameterError, match="must ascend, each from 0 to 4"):
        from_layers(deep("llama"), layers)


def test_evenly_spaced_layers_have_the_first_and_the_last():
    assert evenly_spaced(4, 30) == (0, 10, 19, 29)
    assert evenly_spaced(1, 30) == (0,)
    assert evenly_spaced(5, 5) == (0, 1, 2, 3, 4)
    with pytest.raises(InvalidParameterError, match="6 layers of the target: it has 5"):
        evenly_spaced(6, 5)


def test_the_draft_has_the_targets_end_tokens():
    target = tiny_module(eos_token_id=7)
    target.generation_config.eos_token_id = [7, 9]
    for draft in (from_layers(target, (0,)), from_scratch(target, Shape(1, 16), seed=0)):
        assert draft.generation_config.eos_token_id == [7, 9]


def test_a_new_draft_has_the_shape_asked_for():
    target = tiny_module()
    draft = from_scratch(target, Shape(3, 16), seed=0)
    assert draft.config.num_hidden_layers == 3
    assert draft.config.hidden_size == 16
    assert draft.config.vocab_size == target.config.vocab_size
    assert draft(TOKENS_BT).logits.shape == target(TOKENS_BT).logits.shape
    again = from_scratch(target, Shape(3, 16), seed=0)
    assert torch.equal(again.lm_head.weight, draft.lm_head.weight)


def test_a_draft_of_the_targets_width_starts_from_its_embeddings():
    target = tiny_module()
    draft = from_scratch(target, Shape(1, 32), seed=0)
    assert torch.equal(draft.model.embed_tokens.weight, target.model.embed_tokens.weight)
    assert draft.lm_head.weight is draft.model.embed_tokens.weight


def test_a_narrower_draft_starts_from_the_targets_embeddings_reduced():
    """Its table spans the best approximation of the target's of that rank: no other, a random one
    or that of the least directions, is as near."""
    target = tiny_module()
    table_VH = target.model.embed_tokens.weight.detach().double()

    def residual(table_Vr):
        fit_rH = torch.linalg.lstsq(table_Vr.double(), table_VH).solution
        return float((table_VH - table_Vr.double() @ fit_rH).norm())

    draft = from_scratch(target, Shape(1, 16), seed=0)
    found_Vr = draft.model.embed_tokens.weight.detach()
    smallest = float(torch.linalg.svdvals(table_VH)[16:].norm())
    assert residual(found_Vr) == pytest.approx(smallest, rel=1e-5)
    assert residual(table_VH[:, :16]) > 1.01 * smallest
    assert 0.5 < float(draft(TOKENS_BT).logits.std()) < 2, "the first loss is about log V"
    wide = from_scratch(target, Shape(1, 64), seed=0)
    assert wide.model.embed_tokens.weight.std() < 0.05, "a wider draft keeps its random weights"


@pytest.mark.parametrize("width", [8, 16, 24, 40, 64, 96, 128, 192, 256, 384, 576, 768])
def test_parameters_read_are_those_of_the_model(width):
    target = tiny_module()
    shape = Shape(2, width)
    assert shape.heads * (width // shape.heads) == width
    draft = from_scratch(target, shape, seed=0)
    assert shape.read(target.config.vocab_size) == parameters_read(draft) == num_parameters(draft)


def test_an_embedding_table_that_is_not_the_head_is_not_read():
    untied, tied = tiny_module(), tiny_module(tie_word_embeddings=True)
    assert parameters_read(tied) == num_parameters(tied)
    assert parameters_read(untied) == num_parameters(untied) - untied.lm_head.weight.numel()


@pytest.mark.parametrize("ratio", [0.1, 0.2, 0.4, 0.8])
def test_the_shape_for_a_cost_costs_that(ratio):
    target = tiny_module(hidden_size=64, intermediate_size=192, num_hidden_layers=16)
    shape = shape_for_cost(target, ratio)
    found = parameters_read(from_scratch(target, shape, seed=0)) / parameters_read(target)
    assert found == pytest.approx(ratio, rel=0.15)


def test_a_cost_that_no_draft_has():
    target = tiny_module(vocab_size=5000)
    with pytest.raises(InvalidParameterError, match="the output head over 5,000 tokens alone"):
        shape_for_cost(target, 0.01)
    for ratio in (0.0, 1.0, -1.0):
        with pytest.raises(InvalidParameterError, match="must be above 0 and below 1"):
            shape_for_cost(target, ratio)


def test_a_shape_that_is_none():
    with pytest.raises(InvalidParameterError, match="width is 12; it must be a multiple of 8"):
        Shape(1, 12)
    with pytest.raises(InvalidParameterError, match="layers is 0"):
        Shape(0, 16)


def test_a_draft_from_layers_runs_in_the_engine():
    from tiny_models import engine_of, greedy, ragged_prompts

    from outrider.runtime import HFModel

    target = tiny(num_hidden_layers=4)
    draft = HFModel(from_layers(target.module, (0, 3)), name="draft")
    prompts = ragged_prompts((5, 9))
    found = engine_of(target, draft, "speculative", 3).generate(prompts, greedy(12))
    plain = engine_of(target).generate(prompts, greedy(12))
    assert [each.token_ids for each in found] == [each.token_ids for each in plain]

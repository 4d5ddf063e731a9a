"""Hidden states of the layers asked for come with the logits, eagerly and compiled."""

from collections.abc import Iterator

import pytest
import torch
from interpreted_graphs import interpreted
from tiny_models import FAMILIES, VOCAB, ragged_prompts, tiny
from tiny_seq2seq import tiny_seq2seq_module
from torch import Tensor

from outrider.core import Context, Draft
from outrider.core.errors import InvalidParameterError
from outrider.runtime import HFModel, Seq2SeqModel
from outrider.runtime.attention_metadata import Nodes
from outrider.runtime.executors.compiled import CompiledExecutor
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.hf import hidden_states
from outrider.testing import SoftmaxDistribution

PROMPTS = ragged_prompts([5, 9])
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
CHAIN_BN = torch.tensor([[0, 4, 2], [0, 7, 7]])


def context_of(prompts: list[list[int]]) -> Context:
    rows = [0] * len(prompts)
    return Context.start(prompts, SoftmaxDistribution(), rows, list(range(len(prompts))))


def chain_of(context: Context) -> Draft:
    tokens_BN = torch.cat([context.root_B[:, None], CHAIN_BN[:, 1:]], 1)
    return Draft.chain(tokens_BN, None, None, "chosen")


def whole(model: HFModel, row: int, layers: tuple[int, ...]) -> Tensor:
    """The hidden states of one plain forward pass over a prompt and its chain, as
    ``transformers`` returns them, (N, H)."""
    tokens = [*PROMPTS[row], *CHAIN_BN[row, 1:].tolist()]
    found = model.module(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    return torch.cat([found.hidden_states[layer][0, -3:] for layer in layers], -1)


@torch.inference_mode()
@pytest.mark.parametrize("family", FAMILIES)
def test_they_are_those_of_transformers(family: str) -> None:
    """Of ragged rows; the last layer's are behind the final norm."""
    dtype = torch.float32 if family == "mixtral" else torch.float64
    plain = tiny(family, dtype=dtype)
    layers = (1, plain.num_layers)
    model = plain.with_hidden_states(layers)
    context = context_of(PROMPTS)
    cache, draft = model.start(context), chain_of(context)
    scores = model.score(cache, draft)
    assert scores.hidden_BNH is not None
    for row in range(2):
        torch.testing.assert_close(scores.hidden_BNH[row], whole(plain, row, layers), **CLOSE)
    wanted = plain.score(plain.start(context), draft)
    assert wanted.hidden_BNH is None
    assert torch.equal(scores.logits_BNV, wanted.logits_BNV)


@torch.inference_mode()
def test_equal_nodes_of_a_tree_have_equal_hidden_states() -> None:
    """Siblings with the same token share a query token."""
    model = tiny(dtype=torch.float64).with_hidden_states((2,))
    context = context_of(PROMPTS[:1])
    tokens_BN = torch.tensor([[int(context.root_B), 3, 3, 8]])
    parents_BN = torch.tensor([[-1, 0, 0, 1]])
    probs_BNV = torch.full((1, 4, VOCAB), 1 / VOCAB)
    draft = Draft(tokens_BN, parents_BN, torch.ones(1, 4, dtype=torch.bool), probs_BNV, "iid")
    hidden_BNH = model.score(model.start(context), draft).hidden_BNH
    assert hidden_BNH is not None
    assert hidden_BNH.shape == (1, 4, 32)
    assert torch.equal(hidden_BNH[:, 1], hidden_BNH[:, 2])
    tokens = [*PROMPTS[0], 3, 8]
    found = model.module(torch.tensor([tokens]), use_cache=False, output_hidden_states=True)
    torch.testing.assert_close(hidden_BNH[0, [0, 1, 3]], found.hidden_states[-1][0, -3:])


@torch.inference_mode()
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders_return_those_of_the_decoder(family: str) -> None:
    module = tiny_seq2seq_module(family, dtype=torch.float64)
    model = Seq2SeqModel(module).with_hidden_states((1, 3))
    first = model.decoder_prompt
    prompt = [*first, 5, 6]
    context = Context.start([prompt], SoftmaxDistribution(), [0], [0], sources=[[9, 8, 7]])
    draft = Draft.chain(context.root_B[:, None], None, None, "chosen")
    hidden_BNH = model.score(model.start(context), draft).hidden_BNH
    found = module(
        input_ids=torch.tensor([[9, 8, 7]]),
        decoder_input_ids=torch.tensor([prompt]),
        output_hidden_states=True,
    ).decoder_hidden_states
    assert hidden_BNH is not None
    torch.testing.assert_close(hidden_BNH[0, 0], torch.cat([found[1][0, -1], found[3][0, -1]]))


def batches(model: HFModel, layers: tuple[int, ...]) -> Iterator[ForwardBatch]:
    """A chain and a tree, each behind a fresh cache."""
    nodes = Nodes(
        torch.tensor([[[True, False, False], [True, True, False], [True, False, True]]] * 2),
        torch.tensor([[0, 1, 1]] * 2),
    )
    for topology in (None, nodes):
        with torch.inference_mode():
            cache = model.start(context_of(PROMPTS))
        yield ForwardBatch(cache, CHAIN_BN, topology, hidden_layers=layers)


@pytest.mark.parametrize("family", ["llama", "gpt2", "gemma3"])
def test_compiled_programs_return_them_too(family: str) -> None:
    layers = (1, tiny(family).num_layers)
    plain, model = tiny(family), tiny(family)
    model.compiled = CompiledExecutor(
        model.module, model.spec, "graph", interpreted, recording=model.eager.recording
    )
    for wanted, batch in zip(batches(plain, layers), batches(model, layers), strict=True):
        with torch.inference_mode():
            found, expected = model.forward(batch), plain.forward(wanted)
        assert found.hidden_BNH is not None
        assert expected.hidden_BNH is not None
        torch.testing.assert_close(found.hidden_BNH, expected.hidden_BNH, **CLOSE)
        torch.testing.assert_close(found.logits_BNV, expected.logits_BNV, **CLOSE)
    made = {(each.kind, each.hidden_layers) for each in model.compiled._programs}
    assert {("chain", layers), ("tree", layers)} <= made
    assert not model.compiled.failed


def test_without_a_way_to_record_them_compiled_models_compute_them_eagerly() -> None:
    plain, model = tiny(), tiny()
    model.compiled = CompiledExecutor(model.module, model.spec, "graph", interpreted)
    for wanted, batch in zip(batches(plain, (2,)), batches(model, (2,)), strict=True):
        with torch.inference_mode():
            hidden_BNH = model.forward(batch).hidden_BNH
            expected_BNH = plain.forward(wanted).hidden_BNH
        assert hidden_BNH is not None
        torch.testing.assert_close(hidden_BNH, expected_BNH)


@torch.inference_mode()
def test_a_forward_pass_that_is_not_asked_records_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """No view is made, no tap runs, and the module has no hooks."""
    model = tiny()
    monkeypatch.setattr(hidden_states.OutputTap, "forward", None)
    context = context_of(PROMPTS)
    assert model.score(model.start(context), chain_of(context)).hidden_BNH is None
    assert not model.eager._tapped
    assert not any(
        part._forward_hooks or part._forward_pre_hooks for part in model.module.modules()
    )


@torch.inference_mode()
def test_damage_is_told_row_by_row() -> None:
    """A token whose embedding is NaN harms the row that holds it, and no other."""
    model = tiny()
    model.module.get_input_embeddings().weight[4] = torch.nan
    cache = model.start(context_of([[1, 2, 3], [5, 6, 7]]))
    output = model.forward(ForwardBatch(cache, torch.tensor([[1, 4], [1, 2]])))
    assert output.finite_B.tolist() == [False, True]
    ((noted, sum_B),) = cache.health.drain()
    assert noted is model
    assert sum_B.isfinite().tolist() == [False, True]


@pytest.mark.parametrize("layer", [0, 3, -1])
def test_a_layer_that_the_model_does_not_have_is_refused(layer: int) -> None:
    with pytest.raises(InvalidParameterError, match="has layers 1 to 2"):
        tiny().with_hidden_states((layer,))

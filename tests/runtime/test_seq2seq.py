"""Encoder-decoders score ragged rows and trees as separate plain passes do, and forget as well."""

import pytest
import torch
from tiny_models import VOCAB, ragged_prompts
from tiny_seq2seq import SEQ2SEQ, decoder_logits, tiny_seq2seq, tiny_seq2seq_module

from outrider.core import Context, Draft, Verdict, path_to
from outrider.core.errors import UnsupportedModelError
from outrider.runtime.hf import seq2seq_decoder
from outrider.runtime.hf.seq2seq import Seq2SeqModel
from outrider.runtime.kernels import use_kernels
from outrider.testing import SoftmaxDistribution, check_model

SOURCES = ragged_prompts([3, 17, 1, 8], seed=1)
TEXTS = [[0], [0, 8, 9], [0, *range(20, 40)], [0, 5, 6, 7, 8, 9, 10]]
NUM_NODES = 6


def random_tree(context: Context, num_nodes: int, generator: torch.Generator) -> Draft:
    """Another random tree in each row."""
    B = context.num_rows
    parents = [[-1] + [_below(i, generator) for i in range(1, num_nodes)] for _ in range(B)]
    tokens_BN = torch.randint(VOCAB, (B, num_nodes), generator=generator)
    tokens_BN[:, 0] = context.root_B
    mask_BN = torch.ones(B, num_nodes, dtype=torch.bool)
    return Draft(tokens_BN, torch.tensor(parents), mask_BN, None, "chosen")


def worst_error(model: Seq2SeqModel, turns: int = 2) -> float:
    """Largest relative error of the logits of random trees in ragged rows, over several commits,
    against one plain forward pass per node over its whole path, each row alone."""
    generator = torch.Generator().manual_seed(3)
    B, worst = len(TEXTS), 0.0
    with torch.inference_mode():
        context = Context.start(TEXTS, SoftmaxDistribution(), [0] * B, range(B), sources=SOURCES)
        cache = model.start(context)
        for _ in range(turns):
            draft = random_tree(context, NUM_NODES, generator)
            logits_BNV = model.score(cache, draft).logits_BNV
            for b in range(B):
                committed = context.tokens_BT[b, : context.lengths[b] - 1].tolist()
                for i in range(NUM_NODES):
                    path = draft.tokens_BN[b][draft.ancestors_BNN[b, i]].tolist()
                    wanted_V = decoder_logits(model.module, SOURCES[b], committed + path)[-1]
                    error = (logits_BNV[b, i] - wanted_V).abs().max() / wanted_V.abs().max()
                    worst = max(worst, float(error))
            node_B = torch.tensor([_below(NUM_NODES, generator) for _ in range(B)])
            depth_B = draft.depth_BN.gather(1, node_B[:, None])[:, 0]
            next_B = torch.randint(VOCAB, (B,), generator=generator)
            verdict = Verdict(path_to(draft, node_B), depth_B, next_B).read()
            model.commit(cache, draft, verdict)
            context.append(verdict.emitted(draft), verdict.num_emitted)
    return worst


@pytest.mark.parametrize("family", SEQ2SEQ)
def test_trees_in_ragged_rows_equal_paths_alone(family: str) -> None:
    assert worst_error(tiny_seq2seq(family)) < 1e-5


@pytest.mark.parametrize("family", ["t5", "t5_v1_1", "marian", "bart"])
def test_eager_attention_agrees(family: str) -> None:
    model = tiny_seq2seq(family)
    model.module.set_attn_implementation("eager")
    assert worst_error(model, 1) < 1e-5


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_kernels_agree(family: str) -> None:
    """Their attention has to be told of the padding of ragged sources, too."""
    model = tiny_seq2seq(family)
    use_kernels(model.module)
    assert worst_error(model, 1) < 1e-5


@pytest.mark.parametrize("family", ["t5", "marian", "bart"])
def test_the_models_own_positions_would_be_wrong(
    family: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The trap: without positions of their own, ragged rows and tree nodes are misplaced."""

    monkeypatch.setattr(seq2seq_decoder, "with_positions", lambda module, decoder, relative: module)
    assert worst_error(tiny_seq2seq(family), 1) > 0.01


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_contract(family: str) -> None:
    """Commits, rows that leave and rows that join, in float64."""
    model = tiny_seq2seq(family, dtype=torch.float64)
    with torch.inference_mode():
        check_model(model, VOCAB, prompts=TEXTS[:3], sources=SOURCES[:3])


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_the_source_is_encoded_once_and_then_forgotten(family: str) -> None:
    model = tiny_seq2seq(family)
    encoder = model.module.get_encoder()
    passes = []
    encoder.register_forward_hook(lambda *_: passes.append(1))
    with torch.inference_mode():
        context = Context.start(TEXTS, SoftmaxDistribution(), [0] * 4, range(4), sources=SOURCES)
        cache = model.start(context)
        for _ in range(3):
            model.score(cache, Draft.root_only(context.root_B))
    assert len(passes) == 1
    assert cache.states_BSW.numel() == 0
    held = cache.num_bytes()
    assert held > cache.cross.num_bytes() > 0


@pytest.mark.parametrize("family", ["t5", "bart"])
def test_an_instance_is_itself_during_a_pass_and_after_it(family: str) -> None:
    """Also after a pass that fails, and with a method of its own that somebody hooked in."""
    model = tiny_seq2seq(family)
    owner = (
        model.module.get_decoder().block[0].layer[0].SelfAttention
        if family == "t5"
        else model.module.get_decoder().embed_positions
    )
    before = dict(owner.__dict__)
    context = Context.start([[0]], SoftmaxDistribution(), [0], [0], sources=[[5]])
    with torch.inference_mode():
        cache = model.start(context)
        assert owner.__dict__ == before
        with pytest.raises(IndexError):
            model.extend(cache, torch.tensor([[VOCAB + 1]]))
        assert owner.__dict__ == before
        hooked = owner.forward if family == "bart" else owner.compute_bias
        name = "forward" if family == "bart" else "compute_bias"
        owner.__dict__[name] = hooked
        model.extend(cache, torch.tensor([[1]]))
        assert owner.__dict__[name] is hooked


def test_refusals() -> None:
    module = tiny_seq2seq_module("bart")
    module.config.model_type = "whatever"
    with pytest.raises(UnsupportedModelError, match=r"type whatever, .* supported: bart, "):
        Seq2SeqModel(module)
    module = tiny_seq2seq_module("marian")
    module.config.decoder_vocab_size = VOCAB + 1
    with pytest.raises(UnsupportedModelError, match="separate vocabularies"):
        Seq2SeqModel(module)
    module = tiny_seq2seq_module("t5", decoder_start_token_id=None)
    with pytest.raises(UnsupportedModelError, match="no decoder_start_token_id"):
        Seq2SeqModel(module)


def _below(limit: int, generator: torch.Generator) -> int:
    return int(torch.randint(limit, (), generator=generator))

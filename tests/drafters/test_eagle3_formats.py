"""EAGLE-3 checkpoints: what the package ``speculators`` wrote and computed, the original layout,
and what we save.

``fixtures`` come from ``scripts/speculators_fixtures.py``: ``speculators`` 0.9.0, under
transformers 5.23.0, wrote the checkpoints and computed the expected logits. It is an independent
implementation.

Legend: T tokens, D draft vocabulary.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tiny_heads import target_of, tiny_head
from tiny_models import tiny
from torch import Tensor

import outrider
from outrider.core import Context
from outrider.core.errors import ModelLoadError
from outrider.drafters.heads.eagle3 import Eagle3Head, Eagle3Model
from outrider.drafters.heads.formats.eagle3 import load_eagle3, save_eagle3
from outrider.drafters.heads.formats.folder import read_config, read_tensors, write_folder
from outrider.drafters.heads.kinds import format_of
from outrider.testing import SoftmaxDistribution
from outrider.train.heads.batches import StateBatch
from outrider.train.heads.eagle3 import Eagle3Training
from outrider.train.heads.states import StateSample

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("eagle3", "eagle3-post-norm", "eagle3-fc-norm", "eagle3-qwen3")
TARGET = tiny(vocab_size=40, hidden_size=16, num_hidden_layers=4, num_key_value_heads=2, head_dim=4)
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


def fixture(name: str) -> tuple[Eagle3Head, dict[str, Tensor]]:
    """A head that the package wrote, and its inputs and logits."""
    return load_eagle3(FIXTURES / name, TARGET), load_file(
        FIXTURES / f"{name}-expected.safetensors"
    )


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_drafter_computes_what_the_package_computes(name: str) -> None:
    """At the first token of a draft, at all positions; and at the two tokens after it, behind every
    prefix, where the head reads features of its own."""
    head, wanted = fixture(name)
    model, tokens_T = Eagle3Model(head, TARGET), wanted["tokens"]
    assert torch.equal(head.vocabulary.target_ids_D, wanted["target_ids"])
    ids_D = head.vocabulary.target_ids_D
    for length in range(1, len(tokens_T) - 2):
        context = Context.start([tokens_T.tolist()], SoftmaxDistribution(), [0], [0])
        cache = model.start(context)
        output = model.read(cache, tokens_T[None, 1 : length + 1], wanted["hidden"][None, :length])
        found_TD = model.logits(output, cache).logits_BNV[0][:, ids_D]
        torch.testing.assert_close(found_TD, wanted["logits.0"][:length], **CLOSE)
        cache.append(length)
        cache.last_BH = output[:, -1]
        for i in (1, 2):
            next_11 = tokens_T[None, length + i : length + i + 1]
            found_D = model.extend(cache, next_11)[0, 0, ids_D]
            cache.append(1)
            torch.testing.assert_close(found_D, wanted[f"logits.{i}"][length - 1], **CLOSE)


@torch.no_grad()
@pytest.mark.parametrize("name", NAMES)
def test_the_training_time_test_computes_what_the_package_computes(name: str) -> None:
    head, wanted = fixture(name)
    tokens_T, F = wanted["tokens"], head.config.fused_size
    T = len(tokens_T)
    hidden_TF = torch.cat([wanted["hidden"], torch.zeros(1, F)])
    sample = StateSample(
        tokens_T, torch.ones(T, dtype=torch.bool), hidden_TF, torch.zeros(T, 16), torch.zeros(T)
    )
    training = Eagle3Training(
        head.network, head.vocabulary, TARGET, ttt_length=3, embedding=head.embedding
    )
    for i, output_1TH in enumerate(training.steps(StateBatch.of([sample]))):
        found_TD = head.network.logits(output_1TH)[0, : T - 1 - i]
        torch.testing.assert_close(found_TD, wanted[f"logits.{i}"][: T - 1 - i], **CLOSE)


@pytest.mark.parametrize("name", NAMES)
def test_what_is_saved_has_the_packages_fields(name: str, tmp_path: Path) -> None:
    """Every field that the package writes, with its value, but for what describes the package's own
    classes; the same tensors; and all that vLLM requires."""
    head, _ = fixture(name)
    save_eagle3(head, tmp_path, torch.float32)
    found, wanted = read_config(tmp_path), read_config(FIXTURES / name)
    assert found is not None
    assert wanted is not None
    own = {"transformers_version", "auto_map", "dtype"}
    layer, wanted_layer = found["transformer_layer_config"], wanted["transformer_layer_config"]
    for fields, expected in ((found, wanted), (layer, wanted_layer)):
        for key in expected.keys() - own - {"transformer_layer_config", "target_hidden_size"}:
            assert fields.get(key) == expected[key], key
    assert found["target_hidden_size"] == 16
    assert layer["model_type"] == ("qwen3" if name == "eagle3-qwen3" else "llama")
    about = found["speculators_config"]
    assert about["proposal_methods"][0]["speculative_tokens"] == 3
    assert about["verifier"]["name_or_path"] == "target"
    saved, written = read_tensors(tmp_path), load_file(FIXTURES / name / "model.safetensors")
    assert saved.keys() == written.keys()
    assert all(torch.equal(saved[key], written[key]) for key in saved)


def test_a_saved_head_loads_as_it_was(tmp_path: Path) -> None:
    """Also one that drafts the whole vocabulary, which has no tables."""
    target = target_of()
    for size in (None, 17):
        head = tiny_head(target, size)
        save_eagle3(head, tmp_path, torch.float32)
        again = load_eagle3(tmp_path, target)
        assert torch.equal(again.vocabulary.target_ids_D, head.vocabulary.target_ids_D)
        assert ("d2t" in read_tensors(tmp_path)) == (size is not None)
        assert again.config.target_layers == head.config.target_layers
        weights = head.network.state_dict()
        assert all(torch.equal(weights[k], w) for k, w in again.network.state_dict().items())


def test_no_tokens_are_made_up(tmp_path: Path) -> None:
    """A head that was trained on has no more fields than before: the configurations of
    ``transformers`` have begin and end tokens by default."""
    target = target_of()
    head = tiny_head(target, 17)
    head.config.layer.bos_token_id = head.config.layer.eos_token_id = None
    for folder in ("first", "second"):
        save_eagle3(head, tmp_path / folder)
        head = load_eagle3(tmp_path / folder, target)
    first, second = (read_config(tmp_path / folder) for folder in ("first", "second"))
    assert first == second
    assert first is not None
    assert "bos_token_id" not in first["transformer_layer_config"]


@pytest.mark.parametrize("suffix", ["bin", "safetensors"])
def test_the_original_layout(suffix: str, tmp_path: Path) -> None:
    """``midlayer.*``, a flat configuration, no embeddings, and no layers but the default ones."""
    head, _ = fixture("eagle3")
    tensors = read_tensors(FIXTURES / "eagle3")
    del tensors["embed_tokens.weight"]
    tensors = {name.replace("layers.0.", "midlayer."): w for name, w in tensors.items()}
    config = {
        **head.config.layer.to_dict(),
        "architectures": ["LlamaForCausalLMEagle3"],
        "draft_vocab_size": 24,
        "num_hidden_layers": 4,
        "norm_before_residual": True,
    }
    write_folder(tmp_path, config, tensors)
    if suffix == "bin":
        torch.save(tensors, tmp_path / "pytorch_model.bin")
        (tmp_path / "model.safetensors").unlink()
    found = format_of(tmp_path)
    assert found is not None
    assert found.kind == "eagle3"
    again = load_eagle3(tmp_path, tiny(vocab_size=40, hidden_size=16, num_hidden_layers=12))
    assert again.embedding is None
    assert again.config.target_layers == (2, 6, 9)
    weights = head.network.state_dict()
    assert all(torch.equal(weights[k], w) for k, w in again.network.state_dict().items())


def changed(folder: Path, changes: dict[str, Tensor | None], **fields: object) -> Path:
    """The package's checkpoint with some tensors and fields replaced; None removes a tensor."""
    tensors = read_tensors(FIXTURES / "eagle3") | changes
    config = {**(read_config(FIXTURES / "eagle3") or {}), **fields}
    write_folder(folder, config, {name: w for name, w in tensors.items() if w is not None})
    return folder


SLIDING = {
    "model_type": "qwen3",
    "num_hidden_layers": 1,
    "use_sliding_window": True,
    "sliding_window": 8,
    "max_window_layers": 0,
}
D2T, T2D = (read_tensors(FIXTURES / "eagle3")[name] for name in ("d2t", "t2d"))


@pytest.mark.parametrize(
    ("changes", "fields", "message"),
    [
        ({"d2t": D2T[:-1]}, {}, r"d2t has shape \(23,\), and the head has 24 output tokens"),
        (
            {"d2t": D2T + 40},
            {},
            r"d2t maps draft token 0 to target token \d+, .* vocabulary has 40",
        ),
        ({"d2t": D2T * 0 - torch.arange(24)}, {}, "maps 24 draft tokens to 1 target tokens"),
        ({"d2t": None}, {}, "drafts 24 of 40 tokens and has no table d2t"),
        ({"t2d": T2D[:-1]}, {}, r"t2d has shape \(39,\), and the target's vocabulary has 40"),
        ({"t2d": torch.ones(40).bool()}, {}, "t2d marks 40 tokens, and d2t lists 24"),
        ({"t2d": T2D.roll(1)}, {}, "t2d marks 24 tokens, and d2t lists 24; they must be the same"),
        ({"lm_head.weight": None}, {}, "has no tensor lm_head.weight"),
        ({"norm.weight": None}, {}, "has no tensor norm.weight"),
        ({"fc.bias": torch.zeros(16)}, {}, "a tensor that no EAGLE-3 head has: fc.bias"),
        ({}, {"draft_vocab_size": 20}, "draft_vocab_size 20, and lm_head has 24 rows"),
        ({}, {"eagle_aux_hidden_state_layer_ids": [1, 2]}, r"fc.weight has shape \(16, 48\)"),
        ({}, {"fc_norm": True, "norm_before_fc": True}, "norm_before_fc and fc_norm"),
        ({}, {"transformer_layer_config": {"model_type": "gpt2"}}, "layers of type 'gpt2'"),
        ({}, {"transformer_layer_config": SLIDING}, "with a sliding window"),
        ({}, {"transformer_layer_config": None}, "has no 'transformer_layer_config'"),
    ],
)
def test_a_damaged_checkpoint_is_named(
    changes: dict[str, Tensor | None], fields: dict[str, object], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_eagle3(changed(tmp_path, changes, **fields), TARGET)


@pytest.mark.parametrize("method", [None, "eagle3"])
def test_a_kind_of_head_that_is_not_supported_is_named(method: str | None, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "xpress"}))
    with pytest.raises(ModelLoadError, match="head of kind 'xpress', which is not supported: take"):
        outrider.load(TARGET, tmp_path, method=method)


def test_unreadable_files_are_named(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ModelLoadError, match=r"cannot read .*config\.json"):
        outrider.load(TARGET, tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"speculators_model_type": "eagle3"}))
    with pytest.raises(ModelLoadError, match="has no weights"):
        outrider.load(TARGET, tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"nothing")
    with pytest.raises(ModelLoadError, match=r"cannot read .*model\.safetensors"):
        outrider.load(TARGET, tmp_path)

"""Files of block heads: those that ``speculators`` wrote draft what the package itself computed,
and what is written is read again."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from tiny_block_heads import DSPARK, tiny_block_head
from tiny_models import engine_of, greedy, tiny, token_ids
from torch import Tensor

import outrider
from outrider import Sampling
from outrider.core import Budget, Context
from outrider.core.errors import IncompatibleError, ModelLoadError, UnsupportedModelError
from outrider.drafters.heads.block import BlockDrafter
from outrider.drafters.heads.block_head import BlockHead
from outrider.drafters.heads.formats.block import load_block, save_block
from outrider.drafters.heads.kinds import format_of
from outrider.runtime import HFModel
from outrider.sampling import Warp

FIXTURES = Path(__file__).parent / "fixtures"
NAMES = ("dflash", "dspark")
V, N = 40, 4


def example(name: str) -> dict[str, Tensor]:
    return load_file(FIXTURES / f"{name}-expected.safetensors")


def target_of(example: dict[str, Tensor]) -> HFModel:
    """A target with the example's embeddings and output head; its layers are of no account, since
    the example's hidden states are handed over."""
    target = tiny(vocab_size=V, hidden_size=16, num_hidden_layers=3)
    with torch.no_grad():
        target.module.get_input_embeddings().weight.copy_(example["embed_VH"])
        if len(example["lm_head_DH"]) == V:
            target.module.get_output_embeddings().weight.copy_(example["lm_head_DH"])
    return target


def anchors(example: dict[str, Tensor]) -> list[int]:
    """The anchors of the example's blocks: all that the package may choose."""
    return example["loss_mask_T"][:-N].nonzero()[:, 0].tolist()


@torch.inference_mode()
@pytest.mark.parametrize("name", NAMES)
def test_drafts_from_what_the_package_computed(name: str) -> None:
    """All anchors of the example as one ragged batch: an anchor's document is the context."""
    seen, head = example(name), load_block(FIXTURES / name)
    drafter = BlockDrafter(head, target_of(seen))
    rows = [range(5 if anchor >= 5 else 0, anchor + 1) for anchor in anchors(seen)]
    B = len(rows)
    prompts = [seen["tokens_T"][row].tolist() for row in rows]
    context = Context.start(prompts, Warp([Sampling()] * B, V), [0] * B, range(B))
    state = drafter.start(context)
    known = [seen["hidden_TE"][row[:-1]] for row in rows]
    hidden_BTE = torch.nn.utils.rnn.pad_sequence(known, batch_first=True, padding_value=9.0)
    drafter.read_prompt(state, context, hidden_BTE, 0)
    draft = drafter.propose(state, context, Budget(N), context.rng)
    num, first = head.config.num_slots, head.config.first_slot
    assert draft.num_nodes == num + 1
    logits_BND = seen["logits_ANxD"].view(B, N, -1)[:, first:]
    if head.config.markov_rank:  # the package was given the true tokens, the draft drew its own
        true_BN = torch.stack([seen["tokens_T"][anchor : anchor + N] for anchor in anchors(seen)])
        logits_BND = logits_BND - head.network.correction(true_BN)
        logits_BND = logits_BND + head.network.correction(draft.tokens_BN[:, :num])
    q_BNV = torch.zeros(B, num, V)
    q_BNV[..., head.vocabulary.target_ids_D] = logits_BND.softmax(-1)
    assert draft.probs_BNV is not None
    torch.testing.assert_close(draft.probs_BNV[:, :num], q_BNV, rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("name", NAMES)
def test_writing_a_head_gives_the_files_that_were_read(name: str, tmp_path: Path) -> None:
    """The same tensors, and the same config but for what transformers adds."""
    save_block(load_block(FIXTURES / name), tmp_path, None, ["LlamaForCausalLM"], torch.float32)
    was, written = (
        load_file(FIXTURES / name / "model.safetensors"),
        load_file(tmp_path / "model.safetensors"),
    )
    assert was.keys() == written.keys()
    for key, tensor in was.items():
        assert torch.equal(tensor, written[key]), key
    before, after = (
        json.loads((f / "config.json").read_text()) for f in (FIXTURES / name, tmp_path)
    )
    assert set(before) - set(after) <= {"auto_map", "transformers_version"}
    layers = "transformer_layer_config"
    for key in set(after) - {layers}:
        assert after[key] == before[key], key
    for key, value in after[layers].items():
        assert value == before[layers].get(key, value), key
    assert "sample_from_anchor" in after


@pytest.mark.parametrize("options", [{}, DSPARK], ids=["dflash", "dspark"])
@pytest.mark.parametrize("size", [None, 17])
def test_a_written_head_is_read_again(
    options: dict[str, Any], size: int | None, tmp_path: Path
) -> None:
    target = tiny(vocab_size=23, num_hidden_layers=4)
    head = tiny_block_head(target, size, **options)
    save_block(head, tmp_path, "org/target", ["LlamaForCausalLM"], torch.float32)
    found = format_of(tmp_path)
    assert found is not None
    assert found.kind == found.method == head.kind
    again = load_block(tmp_path)
    assert again.kind == head.kind
    assert torch.equal(again.vocabulary.target_ids_D, head.vocabulary.target_ids_D)
    for field in ("block_size", "mask_token_id", "target_layers", "num_slots", "markov_rank"):
        assert getattr(again.config, field) == getattr(head.config, field)
    for name, parameter in head.network.named_parameters():
        assert torch.equal(again.network.get_parameter(name), parameter)


def native(tmp_path: Path, nested: bool, dspark: bool) -> Path:
    """The same head as the authors' code saves it."""
    folder = FIXTURES / NAMES[dspark]
    config = json.loads((folder / "config.json").read_text())
    fields = {"mask_token_id": V - 1, "target_layer_ids": [0, 2]}
    if dspark:
        fields |= {key: config[key] for key in ("markov_rank", "markov_head_type")}
        fields |= {"enable_confidence_head": True, "confidence_head_with_markov": True}
        fields |= {"projector_type": "dspark", "draft_vocab_size": 12}
    flat = config["transformer_layer_config"] | {"block_size": N, "num_target_layers": 3}
    flat["architectures"] = ["DSparkDraftModel" if dspark else "DFlashDraftModel"]
    (tmp_path / "config.json").write_text(
        json.dumps(flat | ({"dflash_config": fields} if nested else fields))
    )
    tensors = load_file(folder / "model.safetensors")
    tensors["embed_tokens.weight"] = torch.zeros(V, 16)
    save_file(tensors, tmp_path / "model.safetensors")
    return tmp_path


@pytest.mark.parametrize("nested", [True, False])
@pytest.mark.parametrize("dspark", [True, False])
def test_the_authors_own_format_is_read(tmp_path: Path, nested: bool, dspark: bool) -> None:
    """Their layer ids count from 0 and mean outputs: [0, 2] are hidden states 1 and 3."""
    found = load_block(native(tmp_path, nested, dspark))
    wanted = load_block(FIXTURES / NAMES[dspark])
    assert found.config.target_layers == wanted.config.target_layers == (1, 3)
    assert found.config.sample_from_anchor is dspark
    assert found.config.num_slots == wanted.config.num_slots
    for name, parameter in wanted.network.named_parameters():
        assert torch.equal(found.network.get_parameter(name), parameter)


def changed(tmp_path: Path, name: str = NAMES[1], **settings: Any) -> Path:
    """A fixture with other settings in its config; None removes one."""
    shutil.copytree(FIXTURES / name, tmp_path / "head")
    file = tmp_path / "head" / "config.json"
    config = json.loads(file.read_text()) | settings
    file.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))
    return tmp_path / "head"


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"mask_token_id": None}, "no 'mask_token_id'"),
        ({"mask_token_id": 40}, "mask_token_id=40.*40 tokens"),
        ({"block_size": 0}, "block_size=0"),
        ({"draft_vocab_size": 13}, "13"),
        ({"markov_rank": 4}, r"\(40, 3\).*\(40, 4\)|\(12, 3\).*\(12, 4\)|\(1, 19\).*\(1, 20\)"),
        ({"enable_confidence_head": False}, "confidence_head"),
        ({"aux_hidden_state_layer_ids": [1]}, r"fc.weight.*\(16, 32\).*\(16, 16\)"),
    ],
)
def test_a_config_that_does_not_fit_is_refused(
    settings: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ModelLoadError, match=message):
        load_block(changed(tmp_path, **settings))


def test_variants_that_are_not_supported_are_named(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModelError, match=r"'rnn'.*'vanilla'"):
        load_block(changed(tmp_path, markov_head_type="rnn"))


def test_missing_and_damaged_files_are_named(tmp_path: Path) -> None:
    with pytest.raises(ModelLoadError, match="no config"):
        load_block(tmp_path)
    folder = changed(tmp_path)
    (folder / "model.safetensors").write_bytes(b"damaged")
    with pytest.raises(ModelLoadError, match=r"cannot read .*model\.safetensors"):
        load_block(folder)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ModelLoadError, match="has no weights"):
        load_block(folder)


def test_the_head_says_which_target_it_is_for() -> None:
    head: BlockHead = load_block(FIXTURES / NAMES[1])
    assert (head.kind, head.vocab_size, head.hidden_size) == ("dspark", V, 16)
    assert head.target_layers == (1, 3)


@pytest.mark.parametrize("name", NAMES)
def test_a_folder_runs_by_its_own_method(name: str) -> None:
    """``outrider.load`` takes the method from the folder's config; greedy output is plain's."""
    target = target_of(example(name))
    engine = outrider.load(target, draft=FIXTURES / name)
    assert engine.method.name == name
    prompts = [[1, 2, 3], [4]]
    plain = engine_of(target).generate(prompts, greedy(12))
    assert token_ids(engine.generate(prompts, greedy(12))) == token_ids(plain)
    with pytest.raises(IncompatibleError, match="head of kind"):
        outrider.load(target, draft=FIXTURES / name, method="eagle3")

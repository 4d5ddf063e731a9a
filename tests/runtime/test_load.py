"""Loading: folders with tokenizers, names of devices and dtypes, and every way it can go wrong."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from tiny_models import byte_tokenizer, greedy, hf_generate, tiny_module
from transformers import PreTrainedTokenizerBase

import outrider
from outrider import OutriderError, load, load_model
from outrider.core.errors import (
    IncompatibleError,
    InvalidParameterError,
    ModelLoadError,
    UnknownMethodError,
    VocabularyMismatchError,
)
from outrider.drafters.tree.topology import Topology
from outrider.methods import METHODS
from outrider.runtime import HFModel, check_vocabularies
from outrider.runtime.hf.load import has_bfloat16, resolve_device, resolve_dtype

CPU = {"dtype": "float32", "device": "cpu"}


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerBase:
    return byte_tokenizer()


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory, tokenizer: PreTrainedTokenizerBase) -> Path:
    """A whole model folder."""
    folder = tmp_path_factory.mktemp("model")
    tiny_module(vocab_size=len(tokenizer)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    """A copy to damage."""
    return Path(shutil.copytree(saved, tmp_path / "copy"))


def refused(
    source: str | Path, error: type[OutriderError] = ModelLoadError, **settings: object
) -> str:
    """The message of a refusal: one line, with the source."""
    with pytest.raises(error) as caught:
        load_model(source, **{**CPU, "role": "draft", **settings})  # type: ignore[arg-type]
    message = str(caught.value)
    assert "\n" not in message
    assert message.strip() == message
    return message


def test_a_folder_gives_model_and_tokenizer(saved: Path) -> None:
    model = load_model(saved, **CPU, role="target")
    assert (model.dtype, model.device.type) == (torch.float32, "cpu")
    assert model.tokenizer is not None
    assert model.tokenizer.decode(model.tokenizer("def f(x)")["input_ids"]) == "def f(x)"
    assert model.name == f"target {saved}"
    assert load_model(model) is model
    assert load_model(str(saved), dtype="float64", device="cpu").dtype == torch.float64


def test_the_engine_from_folders_equals_transformers(saved: Path) -> None:
    engine = load(saved, str(saved), num_speculative_tokens=3, dtype="float32", device="cpu")
    result = engine.generate("def f(x):", greedy(12))
    assert result.token_ids == hf_generate(engine.target.module, result.prompt_ids, 12)
    assert result.text == engine.target.tokenizer.decode(result.token_ids)  # type: ignore[union-attr]


def test_a_model_in_memory_needs_no_folder() -> None:
    module = tiny_module()
    engine = load(module, module, num_speculative_tokens=2)
    assert len(engine.generate([[1, 2, 3]], greedy(5))[0].token_ids) == 5


def test_unknown_paths_and_ids(tmp_path: Path) -> None:
    assert "no such folder" in refused(tmp_path / "nowhere")
    assert "no such folder" in refused("./nowhere")
    assert "no such folder" in refused("~/nowhere/at/all")
    assert "'nobody/nothing'" in refused("nobody/nothing")
    assert "a b c" in refused("a b c")
    (tmp_path / "file").write_text("")
    assert "not a folder" in refused(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    assert "no config.json" in refused(tmp_path / "empty")
    for source in ("./nowhere", "nobody/nothing"):
        assert refused(source).startswith(f"cannot load draft '{source}': ")
    assert "make real" not in refused("nobody/nothing")
    both = refused("HuggingFaceTB/SmolLM2-135M-Instruct")
    assert "two ways to this model: the Hugging Face hub" in both
    assert "`make real`" in both


def test_pickles_are_refused(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    assert "no weights" in refused(folder)
    torch.save({}, folder / "pytorch_model.bin")
    assert "pytorch_model.bin, which are pickles" in refused(folder)


def test_a_folder_of_gguf_files_is_told_from_pickles(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    file = folder / "model.q4_0.gguf"
    file.write_bytes(b"GGUF")
    message = refused(folder)
    assert f"the folder holds GGUF files only: name one of them, such as {str(file)!r}" in message
    (folder / "config.json").unlink()
    assert "GGUF" in refused(folder)


@pytest.mark.parametrize("name", ["model.gguf", "some/model.Q4_K_M.gguf", "model.safetensors"])
def test_a_missing_file_is_not_looked_up_on_the_hub(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def look_up(*_: object, **__: object) -> None:
        raise AssertionError("looked up")

    monkeypatch.setattr("transformers.AutoConfig.from_pretrained", look_up)
    assert "no such file" in refused(name)


def test_tilde_is_the_home_folder(saved: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(saved.parent))
    monkeypatch.setenv("USERPROFILE", str(saved.parent))
    model = load_model(f"~/{saved.name}", **CPU)
    assert model.tokenizer is not None
    assert load_model(Path("~") / saved.name, **CPU).name == f"model ~/{saved.name}"
    file = saved.parent / "tree.json"
    Topology.chain(3).write("~/tree.json")
    assert file.exists()
    assert Topology.read("~/tree.json") == Topology.parse("~/tree.json") == Topology.chain(3)


def test_custom_code_names_the_remedy(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["model_type"] = "their_own"
    config["auto_map"] = {
        "AutoConfig": "theirs.TheirConfig",
        "AutoModelForCausalLM": "theirs.TheirModel",
    }
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "theirs.py").write_text("")
    assert "trust_remote_code=True" in refused(folder)


def test_a_missing_tokenizer_is_an_error(folder: Path) -> None:
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (folder / name).unlink()
    message = refused(folder)
    assert message.startswith("cannot load the tokenizer of draft")
    assert "the folder has none" in message


@pytest.mark.parametrize("content", ["{oops", "{}", ""])
def test_a_damaged_tokenizer_is_an_error(folder: Path, content: str) -> None:
    (folder / "tokenizer.json").write_text(content)
    assert refused(folder).startswith("cannot load the tokenizer of draft")


@pytest.mark.parametrize("content", ["{oops", "{}", '{"model_type": "no-such-kind"}'])
def test_a_damaged_config_is_an_error(folder: Path, content: str) -> None:
    (folder / "config.json").write_text(content)
    assert refused(folder).startswith("cannot load draft")


@pytest.mark.parametrize("share", [0.0, 0.5])
def test_truncated_weights_are_an_error(folder: Path, share: float) -> None:
    weights = folder / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[: int(share * len(content))])
    assert refused(folder).startswith("cannot load draft")


def test_missing_weights_are_not_made_up(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["num_hidden_layers"] += 1
    (folder / "config.json").write_text(json.dumps(config))
    message = refused(folder)
    assert "9 tensors" in message
    assert "model.layers.2." in message


def test_weights_of_another_shape_are_an_error(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text())
    config["intermediate_size"] += 16
    (folder / "config.json").write_text(json.dumps(config))
    assert refused(folder).startswith("cannot load draft")


def test_device_and_dtype_names(saved: Path) -> None:
    cpu = torch.device("cpu")
    assert resolve_device("cpu") == cpu
    assert resolve_dtype("bf16", cpu) == resolve_dtype("bfloat16", cpu) == torch.bfloat16
    assert resolve_dtype("fp16", cpu) == torch.float16
    assert resolve_dtype(torch.float64, cpu) == torch.float64
    for default in (None, "auto"):
        wanted = torch.bfloat16 if has_bfloat16(cpu) else torch.float32
        assert resolve_dtype(default, cpu) == wanted
    assert resolve_device("auto").type in ("cpu", "cuda", "mps")
    for device in ("gpu", "", "cuda:99", "meta"):
        message = refused(saved, InvalidParameterError, device=device)
        assert message.startswith(f"device={device!r}: ")
    for dtype in ("float23", "int8", ""):
        message = refused(saved, InvalidParameterError, dtype=dtype)
        assert message.startswith(f"dtype={dtype!r}: must be one of bf16, ")
    refused(saved, OutriderError, dtype=torch.int8)


def test_bfloat16_is_the_default_where_the_hardware_has_it(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = torch.device("cpu")
    for has, wanted in ((True, torch.bfloat16), (False, torch.float32)):
        for check in ("_is_avx512_bf16_supported", "_is_amx_tile_supported"):
            monkeypatch.setattr(torch.cpu, check, lambda has=has: has, raising=False)
        assert resolve_dtype(None, cpu) == wanted


def _wrapped(words: Sequence[str], width: int | None = None) -> HFModel:
    tokenizer = byte_tokenizer(words)
    return HFModel(tiny_module(vocab_size=width or len(tokenizer)), tokenizer)


def test_different_vocabularies_are_refused() -> None:
    target = _wrapped(["alpha", "beta"])
    same = _wrapped(["alpha", "beta"])
    other = _wrapped(["gamma", "delta"])
    check_vocabularies(target, same)
    with pytest.raises(VocabularyMismatchError, match="different vocabularies") as caught:
        load(target, other)
    assert "\n" not in str(caught.value)


def _named(vocabulary: dict[str, int]) -> HFModel:
    model = _wrapped(["alpha"], 300)
    assert model.tokenizer is not None
    model.tokenizer.get_vocab = lambda: vocabulary  # type: ignore[method-assign]
    return model


def test_no_more_tokens_differ_than_there_are() -> None:
    """Counted among one model's tokens, not among those of both."""
    ours = {f"a{i}": i for i in range(20)}
    theirs = {f"b{i}": i for i in range(30)}
    with pytest.raises(VocabularyMismatchError, match="20 of the target's 20 tokens differ"):
        check_vocabularies(_named(ours), _named(theirs))
    more = ours | {"c": 20, "d": 21}
    with pytest.raises(VocabularyMismatchError, match="2 of the draft's 22 tokens differ"):
        check_vocabularies(_named(ours), _named(more))
    with pytest.raises(VocabularyMismatchError, match="2 of the target's 22 tokens differ"):
        check_vocabularies(_named(more), _named(ours))


def test_equal_sizes_with_swapped_ids_are_refused() -> None:
    """As many tokens, the same tokens, but two of them trade places."""
    target, draft = _wrapped(["alpha"]), _wrapped(["alpha"])
    assert draft.tokenizer is not None
    vocab = dict(draft.tokenizer.get_vocab())
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    draft.tokenizer.get_vocab = lambda: vocab  # type: ignore[method-assign]
    with pytest.raises(VocabularyMismatchError, match="2 of"):
        check_vocabularies(target, draft)


def test_logits_may_be_padded_but_not_too_narrow() -> None:
    target = _wrapped(["alpha"])
    size = target.num_tokens
    check_vocabularies(target, _wrapped(["alpha"], size + 59))
    check_vocabularies(_wrapped(["alpha"], size + 59), target)
    with pytest.raises(VocabularyMismatchError, match="cannot cover"):
        check_vocabularies(target, _wrapped(["alpha"], size - 1))


def test_without_tokenizers_the_widths_must_be_equal() -> None:
    with pytest.raises(VocabularyMismatchError, match="width 50 and 51"):
        load(tiny_module(vocab_size=50), tiny_module(vocab_size=51))


def test_method_and_gamma_are_checked_before_anything_is_loaded() -> None:
    with pytest.raises(UnknownMethodError, match="did you mean 'speculative'"):
        load("./nowhere", method="speculativ")
    for γ in (0, 65, -1, 2.5, True, "5"):
        with pytest.raises(InvalidParameterError, match="num_speculative_tokens="):
            load("./nowhere", num_speculative_tokens=γ)  # type: ignore[arg-type]
    with pytest.raises(IncompatibleError, match="needs a draft model"):
        load(tiny_module())


def test_a_missing_draft_is_said_before_anything_is_loaded(saved: Path) -> None:
    with pytest.raises(IncompatibleError, match="needs a draft model") as caught:
        load("nobody/nothing", method=None)
    for method in ("prompt-lookup", "suffix", "plain"):
        assert f"method='{method}'" in str(caught.value)
        assert not METHODS[method].needs_draft
    with pytest.raises(ModelLoadError, match=r"cannot load draft '\./nowhere'"):
        load("nobody/nothing", "./nowhere")


def test_plain_needs_no_draft_and_loads_none() -> None:
    assert load(tiny_module(), "./nowhere", method="plain").draft is None


def test_errors_are_all_of_one_family() -> None:
    assert issubclass(ModelLoadError, outrider.OutriderError)
    assert issubclass(InvalidParameterError, ValueError)

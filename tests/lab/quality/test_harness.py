"""An engine as a model of lm-evaluation-harness: against plain passes, and against its own model
of ``transformers`` where lm_eval is installed."""

import math
from typing import Any

import pytest
import torch
from tiny_models import byte_tokenizer, engine_of, full_logits, tiny_module
from tiny_seq2seq import tiny_seq2seq_module
from transformers import PreTrainedModel

from outrider import Engine
from outrider.core.errors import InvalidParameterError, PromptError
from outrider.lab.quality.harness import HarnessModel, sampling_of, windows
from outrider.runtime import HFModel
from outrider.runtime.hf.seq2seq import Seq2SeqModel

CONTEXT = "def f(x):"
LONG = "print(hello world) def f(x): return x + 1 " * 16


def module() -> PreTrainedModel:
    return tiny_module(vocab_size=280, eos_token_id=0)


@pytest.fixture(scope="module")
def engine() -> Engine:
    target = HFModel(module(), byte_tokenizer())
    draft = HFModel(tiny_module(seed=1, vocab_size=280, eos_token_id=0))
    return engine_of(target, draft)


@pytest.fixture(scope="module")
def model(engine: Engine) -> HarnessModel:
    return HarnessModel(engine, batch_size=3)


def logprob(tokens: list[int], first: int) -> float:
    """Of the tokens from ``first`` on, by one plain pass over all of them."""
    logprobs_TV = full_logits(module(), tokens)[first - 1 : -1].double().log_softmax(-1)
    return float(logprobs_TV.gather(1, torch.tensor(tokens[first:])[:, None]).sum())


def test_scores_are_those_of_plain_passes(model: HarnessModel) -> None:
    contexts = [model.encode(text) for text in (CONTEXT, "print(", "x")]
    pairs = [
        (context, model.encode(" return x + 1"[: 4 * n + 1])) for n, context in enumerate(contexts)
    ]
    for (context, continuation), (total, _) in zip(pairs, model.score(pairs), strict=True):
        expected = logprob([*context, *continuation], len(context))
        assert total == pytest.approx(expected, abs=1e-3)


def test_a_long_context_loses_its_first_tokens(model: HarnessModel) -> None:
    context, continuation = model.encode(LONG), model.encode(" x + 1")
    assert len(context) > model.limit
    kept = context[-(model.limit + 1 - len(continuation)) :]
    ((total, _),) = model.score([(context, continuation)])
    assert total == pytest.approx(logprob([*kept, *continuation], len(kept)), abs=1e-3)
    with pytest.raises(PromptError, match="does not fit"):
        model.score([([1], [2] * (model.limit + 1))])


@pytest.mark.parametrize("num", [0, 1, 4, 5, 9, 12])
def test_windows_predict_each_token_once_with_all_the_context_there_is_room_for(num: int) -> None:
    tokens, length = list(range(1, num + 1)), 4
    found = list(windows(tokens, 0, length))
    assert [token for _, predicted in found for token in predicted] == tokens
    for index, (context, predicted) in enumerate(found):
        assert context == list(range(predicted[0] - len(context), predicted[0]))
        if index:
            assert len(context) + len(predicted) - 1 == length


def test_texts_are_scored_in_windows(model: HarnessModel) -> None:
    tokens = model.encode(LONG)
    expected = sum(
        logprob([*context, *predicted], len(context))
        for context, predicted in windows(tokens, 0, model.limit)
    )
    assert len(tokens) > 2 * model.limit
    empty, total = model.score_texts(["", LONG])
    assert empty == 0
    assert total == pytest.approx(expected, abs=1e-2)
    assert math.isfinite(total)


def test_generation_is_the_engines(engine: Engine, model: HarnessModel) -> None:
    greedy = {"until": ["\n\n"], "max_gen_toks": 12, "do_sample": False}
    sampled = {"max_gen_toks": 12, "do_sample": True, "temperature": 0.8, "top_k": 20}
    found = model.generate([(CONTEXT, greedy), ("x", sampled)])
    for text, asked in zip(found, ((CONTEXT, greedy), ("x", sampled)), strict=True):
        assert text == engine.generate(asked[0], sampling_of(asked[1])).text
    assert len(model.generate([(LONG, greedy)])) == 1
    with pytest.raises(PromptError, match="max_gen_toks"):
        model.generate([(CONTEXT, {"max_gen_toks": model.limit})])


def test_settings_of_a_generation() -> None:
    default = sampling_of({})
    assert (default.temperature, default.max_new_tokens, default.stop) == (0, 256, ())
    assert sampling_of({"until": "\n", "max_new_tokens": 3}).stop == ("\n",)
    assert sampling_of({"temperature": 0.5}).temperature == 0.5
    assert sampling_of({"temperature": 0.5, "do_sample": False}).temperature == 0
    assert sampling_of({"do_sample": True}).temperature is None
    assert sampling_of({"num_beams": None}).greedy
    with pytest.raises(InvalidParameterError, match="num_beams=4"):
        sampling_of({"num_beams": 4})


def test_an_encoder_decoder_scores_pairs_only() -> None:
    target = Seq2SeqModel(tiny_seq2seq_module(vocab_size=280), byte_tokenizer())
    model = HarnessModel(engine_of(target))
    ((total, _),) = model.score([([3, 4, 5], [6, 7])])
    expected = sum(
        float(target.logits_after([3, 4, 5], [6][:n]).detach().log_softmax(-1)[6 + n])
        for n in range(2)
    )
    assert total == pytest.approx(expected, abs=1e-3)
    with pytest.raises(InvalidParameterError, match="encoder-decoder"):
        model.score_texts(["x"])


def test_a_model_without_a_tokenizer_is_named() -> None:
    with pytest.raises(InvalidParameterError, match="no tokenizer"):
        HarnessModel(engine_of(HFModel(module(), name="bare")))


# ------------------------------------------------------------------------- with lm_eval itself


@pytest.fixture
def lm_eval() -> Any:
    return pytest.importorskip("lm_eval", reason="lm-evaluation-harness is not installed")


def instances(*arguments: tuple[Any, ...]) -> list[Any]:
    from lm_eval.api.instance import Instance

    return [Instance("loglikelihood", {}, each, number) for number, each in enumerate(arguments)]


def test_answers_are_those_of_the_harness_own_model(lm_eval: Any, engine: Engine) -> None:
    from lm_eval.api.registry import get_model
    from lm_eval.models.huggingface import HFLM

    from outrider.lab.quality.lm_eval_model import OutriderLM

    assert get_model("outrider") is OutriderLM
    ours = OutriderLM(engine, batch_size=2)
    theirs = HFLM(pretrained=module(), tokenizer=byte_tokenizer(), max_length=128)
    pairs = instances((CONTEXT, " return x"), ("print(hello ", "world)"), ("", "def"), ("x ", "1"))
    for one, other in zip(
        ours.loglikelihood(pairs, disable_tqdm=True),
        theirs.loglikelihood(pairs, disable_tqdm=True),
        strict=True,
    ):
        assert one[0] == pytest.approx(other[0], abs=1e-3)
        assert one[1] == other[1]
    texts = instances((LONG,), ("def f(x):",))
    assert ours.loglikelihood_rolling(texts, disable_tqdm=True) == pytest.approx(
        theirs.loglikelihood_rolling(texts, disable_tqdm=True), rel=1e-4
    )
    greedy = {"until": ["x"], "max_gen_toks": 16, "do_sample": False}
    contexts = instances((CONTEXT, greedy), ("print(hello", greedy), ("return", greedy))
    assert ours.generate_until(contexts, disable_tqdm=True) == theirs.generate_until(
        contexts, disable_tqdm=True
    )


def test_a_model_is_built_from_arguments(lm_eval: Any, tmp_path: Any) -> None:
    from lm_eval.api.registry import get_model

    import outrider.lab.quality.lm_eval_model  # noqa: F401

    module().save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    model = get_model("outrider").create_from_arg_string(
        f"target={tmp_path},method=plain,dtype=float32", {"batch_size": "auto", "device": None}
    )
    assert model.max_length == 128
    assert model.eot_token_id == model.prefix_token_id == 0
    assert model.loglikelihood(instances((CONTEXT, " return")), disable_tqdm=True)[0][0] < 0


def test_a_missing_harness_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib
    import sys

    from outrider.lab.quality.errors import MissingMetricPackageError

    monkeypatch.setitem(sys.modules, "lm_eval.api.model", None)
    monkeypatch.delitem(sys.modules, "outrider.lab.quality.lm_eval_model", raising=False)
    with pytest.raises(MissingMetricPackageError, match=r"outrider\[lmeval\]"):
        importlib.import_module("outrider.lab.quality.lm_eval_model")

"""``generate(custom_generate=outrider.generate_for_transformers)``: transformers' own output."""

from typing import Any

import pytest
import torch
from tiny_models import tiny_module
from torch import Tensor
from transformers import GenerationConfig, LogitsProcessor
from transformers.generation import GenerateDecoderOnlyOutput
from transformers.generation.streamers import BaseStreamer

import outrider
from outrider.core.errors import InvalidParameterError, PromptError
from outrider.engine import for_transformers

TARGET, DRAFT = tiny_module(seed=1), tiny_module(seed=2)
ONE = torch.tensor([[5, 17, 42, 8]])
RAGGED = torch.tensor([[0, 0, 5, 17, 42], [9, 3, 3, 21, 60], [0, 7, 7, 7, 1]])
MASK = (RAGGED != 0).long()


def ours(inputs: Tensor = ONE, **arguments: Any) -> Any:
    arguments = {"draft_model": DRAFT, "max_new_tokens": 20, "pad_token_id": 0} | arguments
    hook = outrider.generate_for_transformers
    return TARGET.generate(inputs, custom_generate=hook, **arguments)


def theirs(inputs: Tensor = ONE, **arguments: Any) -> Tensor:
    found: Tensor = TARGET.generate(
        inputs, **({"max_new_tokens": 20, "pad_token_id": 0, "do_sample": False} | arguments)
    )
    return found


class NoOdd(LogitsProcessor):
    """Forbids odd tokens."""

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        scores[:, 1::2] = -torch.inf
        return scores


@pytest.mark.parametrize(
    "arguments",
    [
        {},
        {"draft_model": None},
        {"draft_model": None, "method": "suffix"},
        {"method": "block", "num_speculative_tokens": 3},
        {"repetition_penalty": 1.7},
        {"no_repeat_ngram_size": 2},
        {"min_new_tokens": 6, "eos_token_id": 11},
        {"bad_words_ids": [[33], [4, 5]]},
        {"logits_processor": [NoOdd()]},
        {"prefix_allowed_tokens_fn": lambda row, ids: [row + 1, int(ids[-1]) % 90 + 2, 50]},
        {"forced_eos_token_id": 7},
        {"max_length": 9, "max_new_tokens": None},
        {"generation_config": GenerationConfig(max_new_tokens=7, repetition_penalty=1.3)},
    ],
    ids=lambda arguments: ", ".join(arguments) or "defaults",
)
def test_greedy_output_is_transformers_own(arguments: dict[str, Any]) -> None:
    """One prompt, and a ragged batch."""
    own = {"draft_model", "method", "num_speculative_tokens"}
    same = {name: value for name, value in arguments.items() if name not in own}
    if "generation_config" in arguments:
        same["max_new_tokens"] = arguments["max_new_tokens"] = 7
    assert torch.equal(ours(**arguments), theirs(**same))
    batch = {"attention_mask": MASK}
    assert torch.equal(ours(RAGGED, **batch, **arguments), theirs(RAGGED, **batch, **same))


def test_rows_end_at_their_end_token_and_are_padded() -> None:
    """The end tokens are the call's, not the model's."""
    free = theirs(RAGGED, attention_mask=MASK)[:, 5:]
    end = int(free[0, 4])
    found = ours(RAGGED, attention_mask=MASK, eos_token_id=end)
    assert torch.equal(found, theirs(RAGGED, attention_mask=MASK, eos_token_id=end))
    assert (found[0, 10:] == 0).all()


def test_samples_have_transformers_distribution_and_follow_its_seed() -> None:
    """Frequencies of the second token over 4,000 rows, against the exact ones under the same
    parameters; bound of chi-square with a false-alarm probability of 1e-6."""
    from scipy.stats import chi2

    arguments = {"do_sample": True, "temperature": 0.8, "top_k": 6, "max_new_tokens": 2}
    few = []
    for seed in (3, 3, 4):
        torch.manual_seed(seed)
        few.append(ours(ONE, num_return_sequences=200, **arguments))
    assert torch.equal(few[0], few[1])
    assert not torch.equal(few[0], few[2])
    torch.manual_seed(3)
    found = ours(ONE, num_return_sequences=4000, **arguments)
    with torch.no_grad():
        first_V = _warped(TARGET(ONE).logits[0, -1])
        firsts = first_V.nonzero()[:, 0]
        texts = torch.cat([ONE.expand(len(firsts), -1), firsts[:, None]], 1)
        second_FV = torch.stack([_warped(z_V) for z_V in TARGET(texts).logits[:, -1]])
    wanted_FV = 4000 * first_V[firsts, None] * second_FV
    counts_FV = torch.stack(
        [torch.bincount(found[found[:, 4] == x, 5], minlength=len(first_V)) for x in firsts]
    )
    seen = wanted_FV > 0
    assert counts_FV[~seen].sum() == 0
    wanted, counts = wanted_FV[seen], counts_FV[seen]
    rare = wanted < 5
    wanted = torch.cat([wanted[~rare], wanted[rare].sum()[None]]) if rare.any() else wanted
    counts = torch.cat([counts[~rare], counts[rare].sum()[None]]) if rare.any() else counts
    statistic = float(((counts - wanted) ** 2 / wanted).sum())
    assert statistic < chi2.isf(1e-6, len(wanted) - 1)


def _warped(z_V: Tensor) -> Tensor:
    z_V = z_V / 0.8
    return z_V.masked_fill(z_V < z_V.topk(6).values[-1], -torch.inf).softmax(-1)


def test_output_types_are_transformers_own() -> None:
    found = ours(return_dict_in_generate=True)
    assert isinstance(found, GenerateDecoderOnlyOutput)
    assert torch.equal(found.sequences, theirs())


class Recorder(BaseStreamer):
    """Keeps what it is given."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.ended = False

    def put(self, value: Tensor) -> None:
        self.tokens += value.flatten().tolist()

    def end(self) -> None:
        self.ended = True


@pytest.mark.parametrize("name", ["stream_to", "streamer"])
def test_a_streamer_gets_prompt_and_tokens_and_is_ended(name: str) -> None:
    streamer = Recorder()
    found = ours(**{name: streamer})
    assert streamer.tokens == found[0].tolist()
    assert streamer.ended
    with pytest.raises(InvalidParameterError, match="takes one prompt, 3 were given"):
        ours(RAGGED, attention_mask=MASK, **{name: Recorder()})


def test_the_assistant_model_drafts(monkeypatch: pytest.MonkeyPatch) -> None:
    """``generate`` does not hand it to a hook; alone, and with a batch."""
    drafts = []
    plain = for_transformers._engine_for

    def engine_for(model: Any, draft: Any, *rest: Any) -> Any:
        drafts.append(draft)
        return plain(model, draft, *rest)

    monkeypatch.setattr(for_transformers, "_engine_for", engine_for)
    found = ours(draft_model=None, assistant_model=DRAFT)
    assert torch.equal(found, theirs())
    found = ours(RAGGED, attention_mask=MASK, draft_model=None, assistant_model=DRAFT)
    assert torch.equal(found, theirs(RAGGED, attention_mask=MASK))
    assert drafts == [DRAFT, DRAFT]
    with pytest.raises(InvalidParameterError, match="assistant_model and draft_model: are the"):
        ours(draft_model=DRAFT, assistant_model=DRAFT)
    with pytest.raises(InvalidParameterError, match="streamer and stream_to: are the same here"):
        ours(streamer=Recorder(), stream_to=Recorder())


def test_the_hook_may_be_called_by_another_function() -> None:
    """Whose locals are not read."""

    def hook(model: Any, *arguments: Any, **more: Any) -> Any:
        streamer = assistant_model = "not a streamer"  # noqa: F841
        return outrider.generate_for_transformers(model, *arguments, **more)

    found = TARGET.generate(ONE, custom_generate=hook, max_new_tokens=20, pad_token_id=0)
    assert torch.equal(found, theirs())


def test_an_engine_may_be_given_and_must_be_of_this_model() -> None:
    engine = outrider.load(TARGET, DRAFT, generation_config=False)
    assert torch.equal(ours(engine=engine), theirs())
    with pytest.raises(InvalidParameterError, match="loaded for another model"):
        ours(engine=outrider.load(DRAFT, method="plain"))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"num_beams": 3}, "num_beams=3"),
        ({"guidance_scale": 2.0}, "guidance_scale=2.0"),
        ({"return_dict_in_generate": True, "output_scores": True}, "output_scores=True"),
        ({"max_time": 3.0}, "stopping criterion MaxTimeCriteria"),
        ({"token_type_ids": ONE}, "token_type_ids"),
    ],
)
def test_what_cannot_be_obeyed_is_refused_by_name(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidParameterError, ValueError), match=message):
        ours(**arguments)


def test_padding_on_the_right_is_refused() -> None:
    with pytest.raises(PromptError, match="pad on the left"):
        ours(RAGGED.flip(1), attention_mask=MASK.flip(1))

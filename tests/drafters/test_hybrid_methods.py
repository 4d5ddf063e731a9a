"""The method ``hybrid``: greedy output equals plain decoding, and rows are independent."""

import pytest
import torch
from tiny_models import engine_of, greedy, ragged_prompts, tiny, token_ids

from outrider import Engine, Sampling
from outrider.core.errors import InvalidParameterError
from outrider.drafters.sources.hybrid import Hybrid
from outrider.drafters.sources.merge import Merged
from outrider.methods import METHODS

MODES = ["order", "bandit", "tree"]
PROMPTS = [[*prompt, *prompt] for prompt in ragged_prompts([5, 2, 4])]
CHEAP = {"cost_ratio": 0.1, "sources": "lookup,suffix,model"}


def engine(mode: str, family: str = "llama", **options: object) -> Engine:
    """The draft is close to the target, so that tokens of every source are accepted."""
    target, draft = (tiny(family, 0, dtype=torch.float64) for _ in range(2))
    with torch.no_grad():
        for parameter in draft.module.parameters():
            parameter.mul_(1 + 0.2 * torch.sin(torch.arange(parameter.numel())).view_as(parameter))
    return engine_of(target, draft, "hybrid", 4, options={"mode": mode} | CHEAP | options)


@pytest.mark.parametrize("family", ["llama", "gpt2", "mistral"])
@pytest.mark.parametrize("mode", MODES)
def test_greedy_output_is_that_of_plain_decoding(mode: str, family: str) -> None:
    verified = engine(mode, family)
    results = verified.generate(PROMPTS, greedy(24))
    assert token_ids(results) == token_ids(engine_of(verified.target).generate(PROMPTS, greedy(24)))
    assert results.stats.accepted > 0
    assert results.stats.draft_seconds > 0  # the model was asked


@pytest.mark.parametrize("mode", MODES)
def test_rows_do_not_depend_on_each_other(mode: str) -> None:
    sampling = Sampling(temperature=0.9, max_new_tokens=16, ignore_eos=True)
    together = engine(mode).generate(PROMPTS, sampling)
    alone = [engine(mode).generate([prompt], sampling)[0] for prompt in PROMPTS]
    assert [each.token_ids for each in together] == [each.token_ids for each in alone]


def test_modes_select_drafter_and_choice() -> None:
    assert isinstance(engine("tree").drafter, Merged)
    for mode in ("order", "bandit"):
        drafter = engine(mode, sources="model,lookup", model_tokens=3).drafter
        assert isinstance(drafter, Hybrid)
        assert [each.tokens for each in drafter.sources] == [3, 10]
        assert [each.free for each in drafter.sources] == [False, True]
    assert engine("bandit", cost_ratio=0.0).drafter.sources[2].cost == 1  # models of one size
    alone, together = (engine("bandit", learn=learn).drafter for learn in ("request", "all"))
    assert (alone.choice.classify is None, together.choice.classify is None) == (True, False)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"mode": "bandit", "sources": "model"}, "nothing to choose from"),
        ({"sources": "lookup,lookup"}, "sources='lookup,lookup': must be some of lookup, suffix"),
        ({"sources": "lookup,oracle"}, "must be some of lookup, suffix, model"),
        ({"cost_ratio": -1}, "cost_ratio=-1"),
        ({"verify_cost": "inf"}, "verify_cost=inf"),
        ({"model_tokens": 0}, "tokens=0"),
        ({"mode": "order", "suffix_least": 0}, "1 or more tokens"),
        ({"discount": 0}, "discount=0"),
    ],
)
def test_bad_options(options: dict[str, object], words: str) -> None:
    target, draft = tiny("llama", 0), tiny("llama", 1)
    with pytest.raises(InvalidParameterError, match=words):
        engine_of(target, draft, "hybrid", 4, options=options | {"mode": "bandit"} | options)


def test_source_names_are_read_and_written() -> None:
    option = METHODS["hybrid"].options["sources"]
    assert option.plain == "suffix,model"
    assert str(option.parse("model,lookup")) == "model,lookup"

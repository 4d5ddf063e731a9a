"""A module that the user also holds stays as it is: before, during and after generating, and
wherever that is interrupted."""

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from tiny_models import FAMILIES, engine_of, greedy, hf_generate, ragged_prompts, tiny_module
from tiny_seq2seq import seq2seq_generate, tiny_seq2seq_module
from torch import nn

from outrider import Engine
from outrider.runtime import HFModel
from outrider.runtime.hf.seq2seq import Seq2SeqModel
from outrider.runtime.kernels import use_kernels

FILES = ("early_exit.py", "positions.py", "seq2seq.py", "seq2seq_decoder.py", "views.py")
PROMPTS = ragged_prompts([5, 2])
SEQ2SEQ = ("t5", "bart")
CASES = [("early-exit", family) for family in FAMILIES] + [("plain", family) for family in SEQ2SEQ]


def module_of(family: str) -> Any:
    return tiny_seq2seq_module(family) if family in SEQ2SEQ else tiny_module(family)


def engine_around(module: Any, method: str) -> Engine:
    model = (Seq2SeqModel if module.config.is_encoder_decoder else HFModel)(module)
    return engine_of(model, None, method, 2)


def own_text(module: Any) -> tuple[int, ...]:
    """What ``model.generate`` writes."""
    write = seq2seq_generate if module.config.is_encoder_decoder else hf_generate
    return write(module, PROMPTS[0], 4)


def state_of(module: nn.Module) -> list[Any]:
    """All that can be changed of a module: of each part its class and its attributes, dictionaries
    such as those of hooks, parameters and children entry by entry."""
    state: list[Any] = []
    for name, part in module.named_modules():
        for key, value in sorted(vars(part).items()):
            inside = sorted((str(k), id(v)) for k, v in value.items()) if _is_dict(value) else None
            state.append((name, id(part), type(part), key, id(value), inside))
    versions = [(name, id(p), p._version) for name, p in module.named_parameters()]
    config: Any = module.config
    return [*state, *versions, config.to_dict(), config._attn_implementation]


def _is_dict(value: object) -> bool:
    return isinstance(value, dict)


@pytest.mark.parametrize(("method", "family"), CASES)
def test_nothing_of_it_is_changed(method: str, family: str) -> None:
    """Seen from inside the passes of the last part that every pass runs, too."""
    module = module_of(family)
    text = own_text(module)
    seen: list[bool] = []
    watched = [part for part in module.modules() if "norm" in type(part).__name__.lower()][-1]
    watched.register_forward_hook(lambda *call: seen.append(state_of(module) == before))
    before = state_of(module)
    engine_around(module, method).generate(PROMPTS, greedy(4))
    assert seen
    assert all(seen)
    assert state_of(module) == before
    assert own_text(module) == text


def interrupted(work: Callable[[], object], at: int) -> int:
    """Runs ``work`` and raises KeyboardInterrupt before the ``at``-th line that it runs of files
    that make a model do something else than its class says; how many there were until then."""
    count = 0

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        nonlocal count
        if event == "line":
            count += 1
            if count == at:
                raise KeyboardInterrupt
        return trace if Path(frame.f_code.co_filename).name in FILES else None

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        work()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(before)
    return count


@pytest.mark.parametrize(
    ("method", "family"), [("early-exit", "llama"), ("plain", "t5"), ("plain", "bart")]
)
def test_interruptions_leave_nothing_behind(method: str, family: str) -> None:
    module = module_of(family)
    engine = engine_around(module, method)
    text = own_text(module)
    wanted = engine.generate(PROMPTS, greedy(3))
    before = state_of(module)

    def work() -> object:
        return engine.generate([[1, 2]], greedy(2))

    total = interrupted(work, 0)
    assert total > 50
    for at in range(1, total, 4):
        assert interrupted(work, at) == at
        assert state_of(module) == before, f"changed by an interruption at line {at}"
    assert own_text(module) == text
    again = engine.generate(PROMPTS, greedy(3))
    assert [r.token_ids for r in again] == [r.token_ids for r in wanted]


@pytest.mark.parametrize("family", ["llama", "mistral", "bart"])
def test_with_kernels_it_generates_what_it_did(family: str) -> None:
    """A module in memory gets our kernels in place when it is to be compiled or exact. To
    ``transformers`` it must still be the same model, padding and sliding windows included."""
    module = module_of(family)
    prompts = [[0, 0, 0, 0, 5, 6], [*range(11, 17)]]
    ids = torch.tensor(prompts)
    arguments: dict[str, Any] = {"max_new_tokens": 12, "do_sample": False, "pad_token_id": 0}

    def texts() -> list[list[int]]:
        use_cache = not module.config.is_encoder_decoder
        mask = (ids > 0).long()
        done = module.generate(ids, attention_mask=mask, use_cache=use_cache, **arguments)
        return done.tolist()

    before = texts()
    use_kernels(module)
    assert texts() == before

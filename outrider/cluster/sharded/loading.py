"""Loads an engine on every rank: the target sharded, the draft model whole."""

from functools import partial
from pathlib import Path
from typing import Any, Literal, get_args

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from outrider.cluster.sharded.engine import ShardedEngine
from outrider.cluster.sharded.ranks import Ranks
from outrider.cluster.sharded.remote_draft import RankZeroModel
from outrider.core.errors import IncompatibleError, InvalidParameterError
from outrider.core.values import check_choice, shown
from outrider.drafters.heads.kinds import format_of
from outrider.engine.building import EMBEDDED, found
from outrider.engine.loading import load as load_engine
from outrider.engine.settings import AUTO
from outrider.methods import find_method
from outrider.runtime import HFModel, load_model, load_tokenizer
from outrider.runtime.hf.layout import TensorParallel
from outrider.runtime.hf.load import quiet, resolve_dtype

Placement = Literal["replicated", "rank0"]
PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

_NOT_SHARDED = {
    "compile": ("off", "compiled programs hold no exchange between processes"),
    "exact": (False, "sums are exchanged between processes in another order"),
    "quantize_target": (None, "weights of few bits cannot be split"),
    "quantize_draft": (None, "the draft model is loaded as it is"),
}


def load(
    ranks: Ranks,
    target: str | Path = EMBEDDED,
    draft: Any = None,
    method: str | None = None,
    num_speculative_tokens: int | Literal["auto", "auto-repeatable", "fixed"] | None = None,
    *,
    draft_placement: Placement = "replicated",
    dtype: str | torch.dtype | None = None,
    trust_remote_code: bool = False,
    **settings: Any,
) -> ShardedEngine:
    """As ``outrider.load``, on every rank, with the same arguments.

    Args:
        ranks: the processes, from :func:`joined`.
        target: a folder or hub id, or ``"embedded"``.
        draft: as for ``outrider.load``.
        method: as for ``outrider.load``.
        num_speculative_tokens: as for ``outrider.load``.
        draft_placement: ``replicated``: each rank runs the draft model; ``rank0``: rank 0 runs it
            and sends its logits.
        dtype: of both models.
        trust_remote_code: run the Python code that comes with a model.
        settings: further arguments of ``outrider.load``.

    Raises:
        OutriderError: as ``outrider.load``; and RankError where ranks are asked for different
            things, UnsupportedModelError where ``transformers`` has no plan for the target,
            IncompatibleError for settings that a sharded target cannot have.
    """
    check_choice("draft_placement", draft_placement, PLACEMENTS)
    _check_settings(settings, draft_placement)
    _check_device(settings.pop("device", None), ranks.device)
    kind = resolve_dtype(dtype, ranks.device)
    given = {"target": target, "draft": draft, "method": method, "dtype": kind}
    given |= {"num_speculative_tokens": num_speculative_tokens, "draft_placement": draft_placement}
    ranks.check_same(
        "settings",
        _comparable(given | {"trust_remote_code": trust_remote_code} | settings),
        "call load with the same arguments on all ranks",
    )
    if draft is None and isinstance(target, str) and target == EMBEDDED:
        draft = EMBEDDED if method in (None, AUTO) or find_method(method).needs_draft else None
    sharded = load_model(
        found(target, "target"),
        dtype=kind,
        trust_remote_code=trust_remote_code,
        role="target",
        layout=TensorParallel(ranks.size) if ranks.size > 1 else None,
    )
    if _is_model(draft, method):
        draft = found(draft, "draft")
        model = partial(_draft_model, ranks, draft, kind, trust_remote_code, draft_placement)
        draft = draft if isinstance(draft, HFModel) else model()
    engine = load_engine(
        sharded,
        draft,
        method,
        num_speculative_tokens,
        trust_remote_code=trust_remote_code,
        make=partial(ShardedEngine, ranks),
        **settings,
    )
    assert isinstance(engine, ShardedEngine)
    ranks.meet("loaded")
    return engine


def _draft_model(
    ranks: Ranks, source: str | Path, dtype: torch.dtype, trusted: bool, placement: Placement
) -> HFModel:
    """The draft model of this rank."""
    shared: dict[str, Any] = {"trust_remote_code": trusted}
    if placement == "replicated" or ranks.leads:
        model = load_model(source, dtype=dtype, role="draft", **shared)
        if placement == "replicated":
            return model
        if type(model) is not HFModel:
            raise IncompatibleError(
                f"{model.name} is recurrent or an encoder-decoder, whose state all ranks need: "
                f"take draft_placement='replicated'"
            )
        return RankZeroModel(ranks, model.module, model.tokenizer, model.name)
    with quiet(), torch.device("meta"):
        config = AutoConfig.from_pretrained(source, **shared)
        module = AutoModelForCausalLM.from_config(config, dtype=dtype, **shared)
    tokenizer = load_tokenizer(source, role="draft", **shared)
    return RankZeroModel(ranks, module, tokenizer, f"draft {source}")


def _is_model(draft: object, method: str | None) -> bool:
    """Whether the draft is a model for the method, and not a head."""
    if not isinstance(draft, str | Path) or (draft != EMBEDDED and format_of(draft) is not None):
        return False
    return method in (None, AUTO) or find_method(method).needs_draft


def _check_settings(settings: dict[str, Any], placement: Placement) -> None:
    for name, (only, why) in _NOT_SHARDED.items():
        if settings.get(name, only) != only:
            raise InvalidParameterError(
                f"{name}={shown(settings[name])} does not work with a sharded target, as {why}: "
                f"leave it out"
            )
    if settings.get("prefix_cache") is not None and placement == "rank0":
        raise InvalidParameterError(
            f"prefix_cache={shown(settings['prefix_cache'])} needs draft_placement='replicated', "
            f"so that all ranks keep the same prefixes"
        )


def _check_device(wanted: object, found: torch.device) -> None:
    """Raises InvalidParameterError for a device that the ranks do not run on."""
    if wanted in (None, "auto") or str(wanted) == found.type:
        return
    raise InvalidParameterError(
        f"device={shown(wanted)}: the processes of this machine run on {found.type}; leave it out"
        + (", or hide the GPUs (CUDA_VISIBLE_DEVICES=)" if found.type == "cuda" else "")
    )


def _comparable(arguments: dict[str, Any]) -> dict[str, str]:
    """Of some arguments, those that must be equal and can be compared. One that is None counts as
    left out."""
    return {
        name: repr(each)
        for name, each in arguments.items()
        if each is not None and _is_plain(each) and name != "report"
    }


def _is_plain(value: object) -> bool:
    """Whether two values are equal where their representations are."""
    if isinstance(value, dict):
        return all(map(_is_plain, value.values()))
    if isinstance(value, list | tuple):
        return all(map(_is_plain, value))
    return value is None or isinstance(value, str | Path | int | float | torch.dtype)

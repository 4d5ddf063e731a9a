"""A model's pass as one compiled graph, for any number of tokens, slots and rows.

``torch.compile`` with symbolic sizes: tokens per row, rows, slots allocated and slots read. So one
graph serves every draft length, tree and context, and a second one batches (the compiler treats a
size of one as a constant); a pass over one token is padded to two, which costs no more. Linear
layers and attention are our kernels, which need no tuning per shape, so that a graph takes half a
minute and not half a minute per shape.

Guards on parameters and globals are left out: the module is ours, and is not changed behind the
graph's back. Whatever does not compile runs as it would have without, after one warning.

Legend: B rows, N columns of a pass, S slots.
"""

import os
import warnings
from collections.abc import Callable, Mapping, Sequence
from types import FunctionType, MethodType
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from torch._inductor.runtime.cache_dir_utils import default_cache_dir
from transformers import PreTrainedModel
from transformers.cache_utils import Cache

from outrider.core.errors import InvalidParameterError, OutriderWarning
from outrider.models.cache import SlabCache
from outrider.models.kernels import NarrowLinear
from outrider.models.kernels.build import cache_folder
from outrider.models.kernels.join import JoinLinears
from outrider.models.masks import chain_mask

Compile = Literal["off", "auto", "max"]
_FOLDER = "TORCHINDUCTOR_CACHE_DIR"
MOST_TOKENS = 128
"""Tokens of a pass, over all rows, up to which the graph is used. Beyond it, as in a prefill, the
arithmetic decides and not the overhead."""


_Outputs = tuple[Tensor, Tensor]


def check_compile(value: str) -> None:
    """Raises InvalidParameterError unless the value is one that can be."""
    if value not in get_args(Compile):
        raise InvalidParameterError(
            f"compile={value!r}: must be one of {', '.join(get_args(Compile))}"
        )


class _Slabs(Cache):
    """The slabs of a pass inside the graph: every row writes at its own slots."""

    is_compileable = False

    def __init__(self, keys: list[Tensor], values: list[Tensor], slots_BN: Tensor, span: int):
        super().__init__(layers=[])
        self._keys, self._values, self._span = keys, values, span
        self._slots_BN = slots_BN
        self._rows_B1 = torch.arange(slots_BN.shape[0], device=slots_BN.device)[:, None]

    def update(
        self, key_states: Tensor, value_states: Tensor, layer_idx: int, *_: Any, **__: Any
    ) -> tuple[Tensor, Tensor]:
        return (
            self._write(self._keys[layer_idx], key_states),
            self._write(self._values[layer_idx], value_states),
        )

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0

    def get_mask_sizes(self, query_length: int, layer_idx: int = 0) -> tuple[int, int]:
        return self._span, 0

    def _write(self, slab: Tensor, new_BHNC: Tensor) -> Tensor:
        slab[self._rows_B1, :, self._slots_BN] = new_BHNC.transpose(1, 2)
        return slab[: new_BHNC.shape[0], :, : self._span]


class _Pass(nn.Module):
    """A pass over columns whose places and masks are given, as those of a tree are."""

    def __init__(self, module: nn.Module, windows: Mapping[str, int | None]) -> None:
        super().__init__()
        self.module = module
        self.windows = dict(windows)

    def forward(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        slots_BN: Tensor,
        masks: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        mask = dict(zip(self.windows, masks, strict=True)) if len(masks) > 1 else masks[0]
        logits_BNV: Tensor = self.module(
            input_ids=tokens_BN,
            position_ids=positions_BN,
            attention_mask=mask,
            past_key_values=_Slabs(keys, values, slots_BN, masks[0].shape[-1]),
            use_cache=True,
        ).logits
        return logits_BNV, logits_BNV.sum((1, 2), dtype=torch.float32)


class _Chain(_Pass):
    """A pass over columns that follow one another: places and masks are part of the graph."""

    def __init__(
        self, module: nn.Module, windows: Mapping[str, int | None], limit: int, dtype: torch.dtype
    ) -> None:
        super().__init__(module, windows)
        self.limit, self.dtype = limit, dtype

    def forward(  # type: ignore[override]
        self,
        tokens_BN: Tensor,
        length_B: Tensor,
        slot_S: Tensor,
        keys: list[Tensor],
        values: list[Tensor],
    ) -> tuple[Tensor, Tensor]:
        N, span = tokens_BN.shape[1], slot_S.shape[0]
        places_BN = length_B[:, None] + torch.arange(N, device=length_B.device)
        masks = [
            chain_mask(places_BN, span, self.dtype, window) for window in self.windows.values()
        ]
        positions_BN = places_BN.clamp(max=self.limit - 1)
        return super().forward(tokens_BN, positions_BN, places_BN, masks, keys, values)


class CompiledPass:
    """The graphs of a module, made when they are first needed: for chains and for trees, for one
    row and for several.

    Args:
        module: the model.
        windows: what each kind of layer sees; None for everything.
        limit: its longest context in tokens.
        name: how messages call it.
        thorough: let the compiler try several ways to multiply and keep the fastest.
        backend: of ``torch.compile``.

    Attributes:
        failed: whether it has given up.
    """

    def __init__(
        self,
        module: PreTrainedModel,
        windows: Mapping[str, int | None],
        limit: int,
        name: str,
        thorough: bool = False,
        backend: str = "inductor",
    ) -> None:
        _keep_graphs()
        self.name = name
        self.failed = False
        self._num_masks = len(windows)
        self._dtype = module.dtype
        self._made: set[tuple[bool, bool]] = set()
        self._slot_S = torch.arange(0, device=module.device)
        options: dict[str, Any] = {"guard_filter_fn": _needed_guards, "size_asserts": False}
        if backend == "inductor" and any(isinstance(x, NarrowLinear) for x in module.modules()):
            options["post_grad_custom_post_pass"] = JoinLinears()
        if thorough:
            options["max_autotune"] = True
        self._tree, self._chain = (
            torch.compile(_own_forward(each), fullgraph=True, backend=backend, options=options)
            for each in (
                _Pass(module, windows),
                _Chain(module, windows, limit, self._dtype),
            )
        )

    def chain(self, cache: SlabCache, tokens_BN: Tensor) -> tuple[Tensor, Tensor] | None:
        """Logits (B, N, V) of columns that follow one another and their sums (B,), or None if
        there is no graph: then the pass is still to do. The cache's slabs must have room for it."""
        keys, values = _of_rows(cache)
        single = cache.num_rows == 1
        if not self._ready(single, False, keys, values):
            return None
        if self._slot_S.shape[0] < cache.span:
            self._slot_S = torch.arange(2 * cache.span, device=tokens_BN.device)
        slot_S = self._slot_S[: cache.span]
        return _steadily(
            self._chain, _fresh(tokens_BN), _fresh(cache.length_B), slot_S, keys, values
        )

    def tree(
        self,
        cache: SlabCache,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        slots_BN: Tensor,
        masks: Sequence[Tensor],
    ) -> tuple[Tensor, Tensor] | None:
        """The same for columns with places and masks, one (B, 1, N, S) per kind of layer."""
        keys, values = _of_rows(cache)
        if not self._ready(cache.num_rows == 1, True, keys, values):
            return None
        places = (_fresh(tensor) for tensor in (tokens_BN, positions_BN, slots_BN))
        B = cache.num_rows
        each = [_fresh(mask.expand(B, -1, -1, -1)) for mask in masks]
        return _steadily(self._tree, *places, each, keys, values)

    def _ready(
        self, single: bool, tree: bool, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> bool:
        """Makes the graph if it has to be made, on a pass whose sizes all differ, lest the
        compiler take two of them for one."""
        if self.failed or (single, tree) in self._made:
            return not self.failed
        rows, columns, span, slots = 1 if single else 3, 5, 23, 40
        device = keys[0].device
        tokens_BN = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        places_BN = torch.arange(span - columns, span, device=device).repeat(rows, 1)
        slabs = [
            [slab.new_zeros(rows, slab.shape[1], slots, slab.shape[3]) for slab in side]
            for side in (keys, values)
        ]
        row = [] if single else [0]
        for slab in (*slabs[0], *slabs[1]):
            _mark(slab, [*row, 2])
        _mark(tokens_BN, [*row, 1])
        try:
            if tree:
                masks = [
                    torch.zeros(rows, 1, columns, span, dtype=self._dtype, device=device)
                    for _ in range(self._num_masks)
                ]
                positions_BN = places_BN.clone()
                for tensor in (positions_BN, places_BN):
                    _mark(tensor, [*row, 1])
                for mask in masks:
                    _mark(mask, [*row, 2, 3])
                self._tree(tokens_BN, positions_BN, places_BN, masks, *slabs)
            else:
                length_B = torch.full((rows,), span - columns, device=device)
                slot_S = torch.arange(span, device=device)
                _mark(length_B, row)
                _mark(slot_S, [0])
                self._chain(tokens_BN, length_B, slot_S, *slabs)
        except Exception as error:  # the compiler's own exceptions are of many kinds
            self.failed = True
            text = str(error).strip().splitlines() or [type(error).__name__]
            warnings.warn(
                f"{self.name} does not compile, so it runs eagerly: {text[0]}",
                OutriderWarning,
                stacklevel=2,
            )
        self._made.add((single, tree))
        return not self.failed


def _own_forward(module: nn.Module) -> Any:
    """A module's ``forward`` with code of its own. The compiler keeps graphs by code object, so
    another model's would otherwise be taken for this one's wherever the sizes are the same."""
    forward = type(module).forward
    own = FunctionType(
        forward.__code__.replace(),
        forward.__globals__,
        forward.__name__,
        forward.__defaults__,
        forward.__closure__,
    )
    return MethodType(own, module)


def _keep_graphs() -> None:
    """Keeps what is compiled in the user's cache folder, unless the user has named another; torch
    itself takes a temporary one, and writes that into the environment when it is first asked."""
    if os.environ.get(_FOLDER) in (None, default_cache_dir()):
        os.environ[_FOLDER] = str(cache_folder() / "inductor")


def _steadily(graph: Callable[..., _Outputs], *inputs: Any) -> _Outputs:
    """A pass in which only what tells our graphs apart is checked: of a small model's pass, guards
    would be a seventh. Should none of the graphs fit after all, another is made."""
    try:
        with torch.compiler.set_stance(skip_guard_eval_unsafe=True):
            return graph(*inputs)
    except RuntimeError as error:
        if "skip_guard_eval_unsafe" not in str(error):
            raise
    return graph(*inputs)


def _of_rows(cache: SlabCache) -> tuple[list[Tensor], list[Tensor]]:
    """Slabs without the rows that are not in use."""
    keys, values = (
        [slab[: cache.num_rows] for slab in side if slab is not None]
        for side in (cache.keys, cache.values)
    )
    return keys, values


def _fresh(tensor: Tensor) -> Tensor:
    """A tensor in storage of its own, for the graph takes a view's strides and offset for new."""
    alone = tensor.is_contiguous() and tensor.stride(0) == tensor[0].numel()
    if alone and tensor.storage_offset() == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _mark(tensor: Tensor, sizes: Sequence[int]) -> None:
    """Says which sizes will vary."""
    torch._dynamo.mark_dynamic(tensor, list(sizes))


def _needed_guards(entries: Sequence[Any]) -> list[bool]:
    """Guards on the sizes of what is passed in; the module and its globals do not change."""
    return [
        entry.guard_type == "SHAPE_ENV"
        or (entry.guard_type == "TENSOR_MATCH" and not isinstance(entry.value, nn.Parameter))
        for entry in entries
    ]

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
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn
from transformers.cache_utils import Cache

from outrider.core.errors import InvalidParameterError, OutriderWarning
from outrider.models.cache import SlabCache
from outrider.models.kernels import NarrowLinear
from outrider.models.kernels.build import cache_folder
from outrider.models.kernels.join import JoinLinears

Compile = Literal["off", "auto", "max"]
MOST_TOKENS = 128
"""Tokens of a pass, over all rows, up to which the graph is used. Beyond it, as in a prefill, the
arithmetic decides and not the overhead."""


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
    def __init__(self, module: nn.Module, kinds: Sequence[str]) -> None:
        super().__init__()
        self.module = module
        self.kinds = tuple(kinds)

    def forward(
        self,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        slots_BN: Tensor,
        masks: list[Tensor],
        keys: list[Tensor],
        values: list[Tensor],
    ) -> Tensor:
        cache = _Slabs(keys, values, slots_BN, masks[0].shape[-1])
        mask = dict(zip(self.kinds, masks, strict=True)) if len(masks) > 1 else masks[0]
        logits_BNV: Tensor = self.module(
            input_ids=tokens_BN,
            position_ids=positions_BN,
            attention_mask=mask,
            past_key_values=cache,
            use_cache=True,
        ).logits
        return logits_BNV


class CompiledPass:
    """The graphs of a module, made when they are first needed.

    Args:
        module: the model.
        kinds: its kinds of layers, one mask each.
        name: how messages call it.
        thorough: spend longer on compiling for less overhead per pass.
        backend: of ``torch.compile``.

    Attributes:
        failed: whether it has given up.
    """

    def __init__(
        self,
        module: nn.Module,
        kinds: Sequence[str],
        name: str,
        thorough: bool = False,
        backend: str = "inductor",
    ) -> None:
        os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(cache_folder() / "inductor"))
        self.name = name
        self.failed = False
        self._kinds = tuple(kinds)
        options: dict[str, Any] = {"guard_filter_fn": _needed_guards}
        if backend == "inductor" and any(isinstance(x, NarrowLinear) for x in module.modules()):
            options["post_grad_custom_post_pass"] = JoinLinears()
        if thorough:
            options["cpp_wrapper"] = True
        self._run: Callable[..., Tensor] = torch.compile(
            _Pass(module, kinds), fullgraph=True, backend=backend, options=options
        )
        self._made: set[bool] = set()

    def __call__(
        self,
        cache: SlabCache,
        tokens_BN: Tensor,
        positions_BN: Tensor,
        slots_BN: Tensor,
        masks: Sequence[Tensor],
    ) -> Tensor | None:
        """Logits (B, N, V), or None if there is no graph: then the pass is still to do.

        The cache's slabs must have room for it.
        """
        B = tokens_BN.shape[0]
        keys, values = (
            [slab[:B] for slab in side if slab is not None] for side in (cache.keys, cache.values)
        )
        if not self.failed and (B == 1) not in self._made:
            self._make(B == 1, masks[0].dtype, keys, values)
        if self.failed:
            return None
        fresh = (_fresh(tensor) for tensor in (tokens_BN, positions_BN, slots_BN))
        return self._run(*fresh, [_fresh(mask) for mask in masks], keys, values)

    def _make(
        self, single: bool, dtype: torch.dtype, keys: Sequence[Tensor], values: Sequence[Tensor]
    ) -> None:
        """Compiles on a pass whose sizes differ, lest the compiler take two of them for one."""
        rows, columns, span, slots = 1 if single else 3, 5, 23, 40
        device = keys[0].device
        tokens_BN = torch.zeros(rows, columns, dtype=torch.int64, device=device)
        places_BN = torch.arange(span - columns, span, device=device).repeat(rows, 1)
        positions_BN = places_BN.clone()
        masks = [
            torch.zeros(rows, 1, columns, span, dtype=dtype, device=device) for _ in self._kinds
        ]
        slabs = [
            [slab.new_zeros(rows, slab.shape[1], slots, slab.shape[3]) for slab in side]
            for side in (keys, values)
        ]
        row = [] if single else [0]
        for tensor in (tokens_BN, positions_BN, places_BN):
            _mark(tensor, [*row, 1])
        for mask in masks:
            _mark(mask, [*row, 2, 3])
        for slab in (*slabs[0], *slabs[1]):
            _mark(slab, [*row, 2])
        try:
            self._run(tokens_BN, positions_BN, places_BN, masks, *slabs)
        except Exception as error:  # the compiler's own exceptions are of many kinds
            self.failed = True
            text = str(error).strip().splitlines() or [type(error).__name__]
            warnings.warn(
                f"{self.name} does not compile, so it runs eagerly: {text[0]}",
                OutriderWarning,
                stacklevel=2,
            )
        self._made.add(single)


def _fresh(tensor: Tensor) -> Tensor:
    """A tensor in storage of its own, for the graph holds a view's strides and offset to be new."""
    alone = tensor.is_contiguous() and tensor.stride(0) == tensor[0].numel()
    if alone and tensor.storage_offset() == 0:
        return tensor
    return tensor.clone(memory_format=torch.contiguous_format)


def _mark(tensor: Tensor, sizes: Sequence[int]) -> None:
    torch._dynamo.mark_dynamic(tensor, list(sizes))


def _needed_guards(entries: Sequence[Any]) -> list[bool]:
    """Guards on the sizes of what is passed in; the module and its globals do not change."""
    return [
        entry.guard_type == "SHAPE_ENV"
        or (entry.guard_type == "TENSOR_MATCH" and not isinstance(entry.value, nn.Parameter))
        for entry in entries
    ]

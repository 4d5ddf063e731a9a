"""Packs the weights of linear layers in panels of outputs, as the kernels read them.

Legend: K inputs, N outputs, G groups of inputs.
"""

import ctypes

import torch
from torch import Tensor
from torch.nn.functional import pad

_STEP = 8
"""Inputs of a group whose integers are unpacked at once (``grouped.h``)."""

_CHUNK = 32
"""Inputs, of which groups have a multiple (``integer_dots.h``)."""


def pack(weight_NK: Tensor, keep_dtype: bool) -> Tensor:
    """Weights as ``packed.h`` reads them, (⌈N / panel⌉, K, panel): in bfloat16, with an even number
    of inputs, where that loses nothing, unless the dtype is to be kept.
    """
    narrow_NK = weight_NK.bfloat16()
    if not keep_dtype and torch.equal(narrow_NK.to(weight_NK.dtype), weight_NK):
        weight_NK = narrow_NK
    num_inputs = 2 if weight_NK.dtype == torch.bfloat16 else 1  # that share a word
    padded_NK = pad(weight_NK, (0, weight_NK.shape[1] % num_inputs))
    panels = _panels(padded_NK)
    words = panels.unflatten(2, (-1, num_inputs)).flip(3).transpose(1, 2)
    return words.reshape(len(panels), -1, panels.shape[1]).contiguous()


def pack_int8(weight_NK: Tensor, scale_N: Tensor) -> Tensor:
    """8-bit integers and the scales of outputs, (⌈N / panel⌉, K + 4, panel), as ``packed.h`` reads
    them.
    """
    values = _panels(weight_NK).transpose(1, 2)
    scales = _panels(scale_N.float().unsqueeze(1)).squeeze(2).contiguous().view(torch.int8)
    return torch.cat((values, scales.view(len(values), -1, values.shape[2])), 1)


def pack_groups(values_NK: Tensor, scale_NG: Tensor, offset_NG: Tensor | None, bits: int) -> Tensor:
    """Integers of 8 or 4 bits, with scales and maybe offsets of groups, as ``grouped.h`` reads
    them.

    Raises:
        ValueError: another number of bits, or inputs that are no groups of a multiple of 8.
    """
    group = _group(values_NK, scale_NG, bits)
    parts = _pack_numbers(scale_NG, offset_NG)
    if bits == 8:
        parts.append(_panels(values_NK).unflatten(2, (-1, group)).permute(0, 2, 3, 1))
    else:
        nibbles = _panels((values_NK if offset_NG is not None else values_NK + 8).int())
        eights = nibbles.unflatten(2, (-1, group // _STEP, _STEP))
        words = eights[..., 0]
        for i in range(1, _STEP):
            words = words | eights[..., i] << 4 * i
        parts.append(_bytes_of(words.permute(0, 2, 3, 1)))
    return torch.cat(parts, 2)


def pack_integer_dots(
    values_NK: Tensor, scale_NG: Tensor, offset_NG: Tensor | None, bits: int
) -> Tensor:
    """The same as ``integer_dots.h`` reads them.

    Raises:
        ValueError: as above; groups that are no multiple of 32, or 8 bits with offsets.
    """
    group = _group(values_NK, scale_NG, bits)
    if group % _CHUNK:
        raise ValueError(f"groups of {group} inputs are no multiple of {_CHUNK}")
    if bits == 8 and offset_NG is not None:
        raise ValueError("integers of 8 bits with offsets cannot be packed")
    bias = 0 if offset_NG is not None else 1 << (bits - 1)
    num_fours = 1 if bits == 8 else 2  # fours of inputs in a word
    fours = _panels(values_NK.int() + bias).to(torch.uint8)
    fours = fours.unflatten(2, (-1, group // (4 * num_fours), num_fours, 4))
    packed = fours[..., 0, :] if bits == 8 else fours[..., 0, :] | fours[..., 1, :] << 4
    parts = [*_pack_numbers(scale_NG, offset_NG), _bytes_of(packed.permute(0, 2, 3, 1, 4))]
    return torch.cat(parts, 2).unsqueeze(-1)


def _panel() -> int:
    """The outputs of a panel, which depend on the width of the processor's vectors."""
    width: int = ctypes.CDLL(None).outrider_panel_outputs()
    return width


def _panels(x_NK: Tensor) -> Tensor:
    """The outputs, filled up with zeros, by panels: (panels, panel, K)."""
    panel = _panel()
    return pad(x_NK, (0, 0, 0, -len(x_NK) % panel)).unflatten(0, (-1, panel))


def _group(values_NK: Tensor, scale_NG: Tensor, bits: int) -> int:
    """The inputs of a group."""
    if bits not in (8, 4):
        raise ValueError(f"integers of {bits} bits cannot be packed")
    num_inputs, num_groups = values_NK.shape[1], scale_NG.shape[1]
    group = num_inputs // num_groups
    if group * num_groups != num_inputs or group % _STEP:
        raise ValueError(
            f"{num_inputs} inputs are not {num_groups} groups of a multiple of {_STEP}"
        )
    return group


def _pack_numbers(scale_NG: Tensor, offset_NG: Tensor | None) -> list[Tensor]:
    """Scales and maybe offsets as rows of bytes of float16 numbers."""
    given = [scale_NG] if offset_NG is None else [scale_NG, offset_NG]
    return [_bytes_of(_panels(each.half()).transpose(1, 2).unsqueeze(2)) for each in given]


def _bytes_of(words: Tensor) -> Tensor:
    """Numbers (panels, groups, rows, panel, …) by their bytes: (panels, groups, rows, panel)."""
    panels, groups, _, panel = words.shape[:4]
    return words.contiguous().view(torch.int8).view(panels, groups, -1, panel)

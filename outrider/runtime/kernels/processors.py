"""The kinds of processors that the kernels are compiled for, and which kernel each of them uses for
how many tokens.

A kind is what torch's CPUID look-up and ``ATEN_CPU_CAPABILITY`` leave: the narrowest setting wins.
Numbers of tokens were measured by ``benchmarks.wide`` on the processor named beside them.
"""

import platform
from typing import NamedTuple

import torch


class Processor(NamedTuple):
    """A kind of processor.

    Attributes:
        name: what results and messages call it.
        capability: torch's name of its vectors.
        flags: the compiler's options for its instructions.
        tiles_from: tokens from which its matrix unit multiplies bfloat16 layers, if it has one.
        groups_from: tokens from which weights of few bits and bfloat16 inputs are multiplied in
            pairs (``grouped_dots.h``, ``grouped_tiles.h``), if it has instructions for pairs.
        folded_from: tokens from which weights of few bits become bfloat16 for its matrix unit
            (``folded_tiles.h``), if it has one.
        optimisation: the compiler's level. It changes no result, since the compiler may neither
            reorder sums nor fuse products into them.
    """

    name: str
    capability: str
    flags: tuple[str, ...] = ()
    tiles_from: int = 16
    groups_from: int = 6
    folded_from: int = 64
    optimisation: str = "-O3"


_AVX2 = ("-mavx2", "-mfma", "-mf16c")
_AVX512 = ("-mavx512f", "-mavx512dq", "-mavx512vl", "-mavx512bw", "-mfma", "-mf16c")
_AVX512_VNNI = (*_AVX512, "-mavx512vnni")
_AVX512_BF16 = (*_AVX512_VNNI, "-mavx512bf16")

# Where torch has no vectors for a processor, they are loops over eight numbers. With -O3 these are
# unrolled, and the sums of several tokens no longer fit into registers. On ARM torch has vectors.
_LOOPS = "-O3" if platform.machine() in ("aarch64", "arm64") else "-O2"

PORTABLE = Processor("portable", "DEFAULT", optimisation=_LOOPS)
AVX2 = Processor("AVX2", "AVX2", _AVX2)
AVX2_VNNI = Processor("AVX2 VNNI", "AVX2", (*_AVX2, "-mavxvnni"))
AVX512 = Processor("AVX-512", "AVX512", _AVX512)
AVX512_VNNI = Processor("AVX-512 VNNI", "AVX512", _AVX512_VNNI)
AVX512_BF16 = Processor("AVX-512 BF16", "AVX512", _AVX512_BF16)  # AMD EPYC (Zen 5)
AMX = Processor(  # Intel Xeon with AMX and 480 MiB of cache
    "AMX BF16",
    "AVX512",
    (*_AVX512_BF16, "-mamx-tile", "-mamx-bf16"),
    tiles_from=2,
    groups_from=5,
)

PROCESSORS = (PORTABLE, AVX2, AVX2_VNNI, AVX512, AVX512_VNNI, AVX512_BF16, AMX)


def processor() -> Processor:
    """The kind of this machine's processor."""
    capability = torch.backends.cpu.get_cpu_capability()
    found = torch.cpu.get_capabilities()
    if capability == "AVX512":
        if not found.get("avx512_vnni"):
            return AVX512
        if not found.get("avx512_bf16"):
            return AVX512_VNNI
        return AMX if found.get("amx_bf16") and found.get("amx_tile") else AVX512_BF16
    if capability == "AVX2":
        return AVX2_VNNI if found.get("avx_vnni") else AVX2
    return PORTABLE

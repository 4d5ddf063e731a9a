"""Loads an engine: builds it (``building.py``), and loads its programs or has them compiled."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, Literal

import torch

from outrider.core.errors import (
    InvalidParameterError,
    OutriderWarning,
)
from outrider.core.protocols import Verifier
from outrider.core.values import check_flag, shown
from outrider.drafters.chain.draft_length import DraftLength
from outrider.drafters.heads.head import Head
from outrider.engine import compiler_process
from outrider.engine.background import (
    BackgroundCompiler,
    Begin,
    compiler_at_hand,
    compiling_beside,
    num_processes,
)
from outrider.engine.building import EMBEDDED, Source, build
from outrider.engine.compiler_memory import CompilerMemory, compiler_memory
from outrider.engine.engine import Engine
from outrider.engine.late_kernels import LateKernels
from outrider.engine.round_times import measure_round_times
from outrider.engine.warming import (
    Report,
    Stage,
    layers_of,
    load_compiled,
    missing_of,
    unloaded,
    warm_up,
)
from outrider.runtime.executors.compiled import Compile, check_compile
from outrider.runtime.executors.prepare import prepare
from outrider.runtime.hf.load import resolve_device
from outrider.runtime.kernels.build import kernels_are_missing, others_compile_kernels
from outrider.runtime.kv_cache.storage import KvDtype
from outrider.runtime.openmp import release_threads


def load(
    target: Source = EMBEDDED,
    draft: Source | Head | None = None,
    method: str | None = None,
    num_speculative_tokens: int | Literal["auto", "auto-repeatable", "fixed"] | None = None,
    *,
    options: Mapping[str, object] | None = None,
    verifier: Verifier | None = None,
    measure: bool = True,
    draft_confidence: float = 0.0,
    draft_length: str | Sequence[Sequence[int]] | DraftLength | None = "fixed",
    max_batch_size: int = 16,
    max_memory: int | str | None = None,
    prefix_cache: int | str | None = None,
    kv_dtype: KvDtype = "auto",
    dtype: str | torch.dtype | None = None,
    device: str | torch.device | None = "auto",
    trust_remote_code: bool = False,
    quantize_draft: str | None = None,
    quantize_target: str | None = None,
    compile: Compile = "off",
    exact: bool = False,
    generation_config: bool = True,
    background: bool = False,
    report: Report | None = None,
    make: Callable[..., Engine] = Engine,
) -> Engine:
    """Loads a target, a draft if the method needs one, and builds the engine.

    Args:
        target: a folder, a hub id, a model in memory, or ``"embedded"`` for the pair that comes
            with the package (its draft is then the default draft).
        draft: the same for the draft model; or the folder of a head that was trained on the target
            (``outrider train-head``, or a published one), or the head in memory.
        method: a name from ``outrider methods``; None takes the head's own where ``draft`` is a
            head, such as ``eagle3``, else ``speculative``. ``auto`` takes the sources at hand:
            copies of earlier tokens and the draft model (``hybrid``), of which the governor leaves
            out the model where it does not pay; copies alone without a draft; copies and an EAGLE-3
            head (``eagle3-hybrid``); another head's own method.
        num_speculative_tokens: γ, most tokens drafted per round (of a tree: its most levels), 1
            to 64. ``auto`` lets the governor choose, round by round, how many pay, none included,
            by the times and the acceptance that it measures (``engine/governor``); at temperatures
            above 0 the tokens of a seed then depend on the machine's speed, unless the method is
            ``coupled``. ``auto-repeatable`` does so unless a sampled request in the batch has a
            seed (``Sampling.seed``); the batch then drafts as ``fixed`` does, so that the seed has
            one output. ``fixed`` takes the drafter's own depth if it has one, such as a tree's,
            else 5. None is ``auto-repeatable`` for lossless methods that draft chains and for
            ``method="auto"``, unless a stopping rule is given; ``fixed`` for all others.
        options: the method's own parameters by name, such as ``{"budget": 0.2}``.
        verifier: a verification rule of your own in place of the method's.
        measure: measure how far a lossy rule diverges from the target, for ``result.stats``.
        draft_confidence: stop drafting after a token less probable than this; 0 never.
        draft_length: ``fixed``; ``heuristic[:START]``, which grows by two where all of a draft was
            accepted and else shrinks by one; ``confidence:C``; ``survival:THETA``, which stops
            once the drafted tokens' joint probability is below 1 - θ; or a table of γ by the number
            of running rows, such as ``[[1, 4, 6], [5, 16, 3], [17, 64, 0]]``, which ``table:``
            precedes in a string.
        max_batch_size: rows that run at the same time.
        max_memory: most bytes of KV buffers, target's and draft's together, such as
            ``512MiB``; requests wait until theirs fit.
        prefix_cache: most bytes of keys and values of ended sequences that are kept, such as
            ``512MiB``, so that a prompt that begins as they did, as the next request of a
            conversation does, is read from there on; None keeps nothing.
        kv_dtype: how KV buffers store numbers: ``auto``, ``bfloat16`` or ``int8``. Of the target's,
            a lower precision changes the distribution that is sampled; of the draft's it does not.
        dtype: of both models; None takes bfloat16 where the hardware computes in it.
        device: ``cpu``, ``cuda``, ``cuda:n``, ``mps``, ``auto``.
        trust_remote_code: run the Python code that comes with a model.
        quantize_draft: weights of few bits for the draft model or head, ``int8``, ``int4``,
            ``int8:32``, ``int8:128``, ``int4:32`` or ``int4:128``, or ``keep`` for the blocks of a
            GGUF file as they are; with ``+a8`` behind one of those in groups, layers round their
            inputs to eight bits, too. Lossless methods stay so.
        quantize_target: the same for the target, which makes it another target.
        compile: ``off``; ``auto``, our kernels for few tokens (CPU) and compiled programs, which
            are compiled the first time and kept in the cache folder (``outrider compile`` does that
            ahead); ``max``, which also tries ways to multiply. What does not compile runs eagerly,
            after a warning. The kernels are slower for models in memory, whose weights they do not
            pack, since others may use them.
        exact: give a token's logits the same bits whatever else is in the forward pass, so that
            greedy and coupled outputs equal plain decoding's in any precision, token for token. On
            a CPU only.
        generation_config: obey the target's generation config: its temperature, repetition penalty
            and the like where ``Sampling`` leaves them None, and its rules for every output, such
            as suppressed tokens. False ignores it.
        background: do not wait for programs that are missing. They are compiled by other processes
            at low priority, and the engine takes each over between two rounds, where that changes
            no output: with ``exact``, programs of forward passes at once; all others while no
            request runs, so that the outputs before and after may differ by their rounding. So are
            the kernels where they are missing, too, unless the engine is ``exact`` or has weights
            of few bits: then loading waits for them. Where not even one process fits into memory,
            nothing is compiled, after a warning. Of no effect for models in memory and on a GPU,
            whose programs are compiled now.
        report: called with what is being loaded or compiled, and with the share that is done, or
            None where it is not known.
        make: makes the engine of the loaded models: :class:`Engine`, a subclass of it, or a
            ``functools.partial`` of one, which is called with the arguments of :class:`Engine`. All
            programs of another engine than :class:`Engine` are compiled now, whatever
            ``background`` is, and its governor learns the times of rounds from requests alone,
            since processes that run in lockstep must not measure by clocks of their own.

    Raises:
        OutriderError: see ``load_model`` and :class:`Engine`.
    """
    arguments = dict(locals())
    del arguments["background"], arguments["report"]
    for name, flag in (("background", background), ("exact", exact)):
        check_flag(name, flag)
    if report is not None and not callable(report):
        raise InvalidParameterError(f"report={shown(report)}: must be a function, or None")
    _check_make(make)
    check_compile(compile)
    may_share = compile != "off" and make is Engine and _others_can_load(device, target, draft)
    waits = may_share and kernels_are_missing() and compiler_process.has_room()
    is_plain = not exact and quantize_target is None and quantize_draft is None
    is_late = waits and background and is_plain and others_compile_kernels()
    late = LateKernels() if is_late else None
    with compiler_at_hand(waits) as begin:
        engine = build(**arguments, report=report, prepare=late.prepare if late else prepare)
        is_complete = True
        if may_share:
            is_complete = _load_programs(engine, arguments, background, report, begin, late)
        else:
            warm_up(engine, report)
    if make is Engine and is_complete:  # else rounds will be faster once the programs are there
        measure_round_times(engine, report)
    release_threads()  # requests may run in another thread
    return engine


def _load_programs(
    engine: Engine,
    arguments: Mapping[str, Any],
    background: bool,
    report: Report | None,
    begin: Begin,
    late: LateKernels | None = None,
) -> bool:
    """Loads the engine's programs, and compiles those that are missing, here and in other
    processes, which ``begin`` starts, or in these alone; as many of them as fit into memory.
    Returns whether no program will be added later."""
    memory = compiler_memory(engine)
    if late is not None:
        late.add_heads(engine)
        if memory.num_processes and _compile_later(engine, arguments, memory, begin, late):
            return False
        late.use()
    missing = load_compiled(engine)
    if not missing:
        return True
    if background and not memory.num_processes:
        _warn_of_memory(engine, memory)
        return True
    if background:
        todo = [*missing_of(layers_of(engine)), *missing]
        if _compile_beside(engine, arguments, todo, memory, begin):
            return False
    num = min(num_processes(len(missing) - 1), memory.num_processes)
    start = partial(compiler_process.start, begin=begin)
    with compiling_beside(arguments, num, start) as shared:
        warm_up(engine, report, shared=shared)
    return True


def _compile_later(
    engine: Engine,
    arguments: Mapping[str, Any],
    memory: CompilerMemory,
    begin: Begin,
    late: LateKernels,
) -> bool:
    """Lets other processes compile the kernels, and then all programs; returns whether they do."""
    todo = [late.stage, *layers_of(engine), *unloaded(engine)]
    return _compile_beside(engine, arguments, todo, memory, begin)


def _compile_beside(
    engine: Engine,
    arguments: Mapping[str, Any],
    todo: Sequence[Stage],
    memory: CompilerMemory,
    begin: Begin,
) -> bool:
    """Lets other processes compile beside requests; returns whether they do."""
    with suppress(Exception):  # no other process can be started, or told the arguments
        num = min(num_processes(len(todo)) or 1, memory.num_processes)
        start = partial(compiler_process.start, layers=True, begin=begin)
        engine.compiler = BackgroundCompiler(arguments, todo, num, start)
        return True
    return False


def _warn_of_memory(engine: Engine, memory: CompilerMemory) -> None:
    names = dict.fromkeys(
        each.name for each in (engine.target, *engine.drafter.capabilities.models)
    )
    warnings.warn(
        f"{' and '.join(names)}: programs are not compiled in the background, and what is missing "
        f"runs without: a process that compiles takes about {memory.needed / 2**30:.1f} GiB, and "
        f"{max(0, memory.free) / 2**30:.1f} GiB of memory are free; free some, or compile ahead by "
        f"`outrider compile`",
        OutriderWarning,
        stacklevel=3,
    )


def _check_make(make: object) -> None:
    kind = make.func if isinstance(make, partial) else make
    if not (isinstance(kind, type) and issubclass(kind, Engine)):
        raise InvalidParameterError(
            f"make={shown(make)}: must be Engine, a subclass of it, or a functools.partial of one"
        )


def _others_can_load(device: str | torch.device | None, *sources: Source | Head | None) -> bool:
    """Whether another process finds the same models, and has memory of its own for them."""
    on_cpu = resolve_device(device).type == "cpu"
    return on_cpu and all(each is None or isinstance(each, str | Path) for each in sources)

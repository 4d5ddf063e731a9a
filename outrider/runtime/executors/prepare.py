"""Chooses how a model runs: eagerly, with our kernels, compiled, exactly.

    off     the module as it is
    auto    on a CPU, our kernels for few tokens, and every forward pass of a round one compiled
            program; on CUDA the model's own kernels, whose launches a CUDA graph captures
    max     the same, and the compiler tries several ways to multiply, which takes longer; on a CPU
            our kernels leave it little to try. On CUDA compiled programs, whose launches a CUDA
            graph captures

``exact`` is about results: a token's logits have the same bits whether it is computed alone, in a
draft, a tree or a batch, so that greedy and coupled output equals plain decoding's, token for
token, in any precision and on any processor. That follows from the operators of a forward pass
(``kernels/exact.py``). When a model is loaded, they are listed, and the model is refused if one of
them has bits that depend on the number of tokens. In addition, a few forward passes of different
widths are compared.

Legend: D drafted tokens, N query tokens, V vocabulary.
"""

import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor
from torch.export import ExportedProgram

from outrider.core.errors import KernelError, OutriderWarning, UnsupportedModelError
from outrider.runtime.attention_metadata import Nodes
from outrider.runtime.executors.compile_cache import (
    Missing,
    Program,
    ProgramMissingError,
    compiled_program,
    first_line,
    when_missing,
)
from outrider.runtime.executors.compiled import (
    Check,
    CompiledExecutor,
    Compiler,
    SpanRule,
    check_compile,
)
from outrider.runtime.executors.coupled_draft import race_numbers
from outrider.runtime.executors.cuda_graphs import CudaRecorder, graphed, rounded_span
from outrider.runtime.executors.fused_draft import DraftPlan
from outrider.runtime.executors.own_code import own_code
from outrider.runtime.executors.parity import compare
from outrider.runtime.executors.traced import TreeForward
from outrider.runtime.forward_batch import ForwardBatch
from outrider.runtime.hf.adapter import HFModel
from outrider.runtime.hf.recurrent import RecurrentModel
from outrider.runtime.kernels import use_kernels
from outrider.runtime.kernels.exact import inexact_operator
from outrider.runtime.kernels.fused_layers import use_fused_layers
from outrider.runtime.kv_cache.buffer_pool import BufferPool
from outrider.runtime.prefill import unsampled_context
from outrider.sampling import Sampling, Warp
from outrider.sampling.warp import DraftParameters

_FEWEST_LAYERS = 4
"""Layers of a model whose layers are worth a program of their own."""

_PROBE = 12  # tokens that an exact model is tested on


def prepare(
    model: HFModel, compile: str = "off", *, exact: bool = False, own: bool = False
) -> None:
    """Sets up how a model runs. Its programs are compiled by :func:`stages`, or when first needed.

    Args:
        model: the model; its module is changed in place.
        compile: ``off``, ``auto`` or ``max``.
        exact: whether bits must not depend on how many tokens share a forward pass.
        own: whether nobody else uses the module, so that its weights may be packed.

    Raises:
        InvalidParameterError: another value of ``compile``.
        UnsupportedModelError: the model cannot be exact, or is not on a CPU.
        KernelError: ``exact`` without a C++ compiler. Without ``exact`` there is only a warning.
    """
    check_compile(compile)
    if exact and model.device.type != "cpu":
        raise UnsupportedModelError(
            f"exact=True needs our kernels, which run on the CPU; {model.name} is on "
            f"{model.device}: load it with device='cpu'"
        )
    if exact and isinstance(model, RecurrentModel):
        raise UnsupportedModelError(
            f"exact=True: {model.name} ({type(model.module).__name__}) has recurrent layers, whose "
            f"bits depend on how many tokens share a forward pass: load it without exact"
        )
    if compile == "off" and not exact:
        return
    if model.device.type == "cpu":
        try:
            _use_kernels(model, own, exact=exact)
        except KernelError as error:
            if exact:
                raise
            _warn(f"{model.name} runs eagerly: {error}")
            return
    model.exact = exact
    if exact:
        check_exact(model)
    if compile != "off":
        _compile(model, own, thorough=compile == "max")


def prepare_without_kernels(
    model: HFModel, compile: str, *, own: bool = False
) -> Callable[[], None]:
    """Sets up how a model on a CPU runs that is not exact and gets the kernels later. Until then it
    runs eagerly, since its programs call them.

    Args:
        model, compile, own: as of :func:`prepare`; ``compile`` is not ``off``.

    Returns:
        The function that lets the model use the kernels, to be called between two forward passes.
        It raises KernelError if they cannot be compiled.
    """
    check_compile(compile)
    _compile(model, own, thorough=compile == "max")
    return partial(_use_kernels, model, own)


def stages(
    model: HFModel,
    drafts: Sequence[int] = (),
    *,
    coupled: bool = False,
    trees: bool = False,
    plan: DraftPlan | None = None,
) -> list[tuple[str, Callable[[], None]]]:
    """The programs of a compiled model, each with a function that compiles it if necessary: for
    chains, for trees, and for fused drafts.

    Args:
        model: the model.
        drafts: lengths of its fused drafts of chains.
        coupled: whether these are drawn with noise that the target shares.
        trees: whether it runs over trees as well.
        plan: its fused drafts of trees, if it makes any.
    """
    if model.compiled is None:
        return []
    found: list[tuple[str, Callable[[], None]]] = []
    if model.compiled.runs_forwards:
        found.append(("forward passes", partial(_chain, model)))
        found += model.further_forwards()
    if trees and model.compiled.runs_forwards:
        found.append(("forward passes over trees", partial(_tree, model)))
    for length in drafts:
        found += draft_stages(model, length, coupled=coupled)
    if plan is not None:
        draft, u_BR = partial(_tree_draft, model, plan), _draws(model, plan.num_draws)
        greedy, sampled = _drafts(model, "trees", draft, u_BR)
        if not plan.argmax:
            sampled = "searches", sampled[1]
        found += [greedy] * plan.argmax + [sampled] * plan.draws
    return found


def layer_stages(model: HFModel) -> list[tuple[str, Callable[[], None]]]:
    """The programs of a model's decoder layers, as :func:`stages`: they are compiled much sooner
    than a program of the whole forward pass, and run the layers until there is one. None of a model
    of few layers, or whose layers cannot run by themselves."""
    compiled = model.compiled
    if compiled is None or not compiled.runs_forwards or model.device.type != "cpu":
        return []
    if model.num_layers < _FEWEST_LAYERS or model.spec.reads_sources:
        return []
    return [("layers", partial(_layers, model))]


def draft_stages(
    model: HFModel, length: int, *, coupled: bool = False
) -> list[tuple[str, Callable[[], None]]]:
    """The greedy and the sampled program of a model's fused drafts of one length; none of a model
    that is not compiled. Arguments as of :func:`stages`."""
    if model.compiled is None:
        return []
    u_BD = _draws(model, length)
    if coupled:
        u_BD = race_numbers(unsampled_context(model, [0]).rng, length)
    return _drafts(model, f"drafts of {length}", partial(_chain_draft, model, length), u_BD)


Numbers = tuple[DraftParameters | None, Tensor | None]
"""What tokens are drawn with; nothing for greedy rows."""


def _drafts(
    model: HFModel, name: str, draft: Callable[[Numbers], None], u_BD: Tensor
) -> list[tuple[str, Callable[[], None]]]:
    """The greedy and the sampled fused draft of one kind, which is drawn with these numbers."""
    warp = Warp([Sampling(temperature=1)], model.num_tokens, model.device)
    parameters = warp.draft_parameters(unsampled_context(model, [0]))
    greedy, sampled = partial(draft, (None, None)), partial(draft, (parameters, u_BD))
    return [(f"greedy {name}", greedy), (f"sampled {name}", sampled)]


def _draws(model: HFModel, num: int) -> Tensor:
    return torch.zeros(1, num, dtype=torch.float64, device=model.device)


@torch.inference_mode()
def _chain(model: HFModel) -> None:
    _run(model)


@torch.inference_mode()
def _layers(model: HFModel) -> None:
    assert model.compiled is not None
    with when_missing(Missing.LEAVE):
        _chain(model)
    if not model.compiled.has_chain(model.hidden_layers):
        model.compiled.run_layers(model.example_cache().in_use())


@torch.inference_mode()
def _tree(model: HFModel) -> None:
    nodes = Nodes(
        torch.tensor([[[True, False], [False, True]]], device=model.device),
        torch.tensor([[0, 0]], device=model.device),
    )
    _run(model, nodes)


def _run(model: HFModel, nodes: Nodes | None = None) -> None:
    """A prefill and a forward pass as ``score`` makes them."""
    context = unsampled_context(model, [0, 0, 0])
    cache, tokens_BN = model.start(context), context.tokens_BT[:, :2]
    model.forward(ForwardBatch(cache, tokens_BN, nodes, hidden_layers=model.hidden_layers))


@torch.inference_mode()
def _chain_draft(model: HFModel, depth: int, numbers: Numbers) -> None:
    context = unsampled_context(model, [0, 0, 0])
    cache = model.start(context)
    model.draft(cache, context.tokens_BT[:, :2], depth, *numbers)


@torch.inference_mode()
def _tree_draft(model: HFModel, plan: DraftPlan, numbers: Numbers) -> None:
    context = unsampled_context(model, [0, 0, 0])
    cache = model.start(context)
    model.draft_by(plan, cache, context.tokens_BT[:, :2], *numbers)


@torch.inference_mode()
def check_exact(model: HFModel) -> None:
    """Raises UnsupportedModelError unless a model's bits are the same however many tokens share a
    forward pass."""
    tokens = [7 * step % model.num_tokens for step in range(1, _PROBE + 1)]
    half = _PROBE // 2
    kind = type(model.module).__name__
    if operator := inexact_operator(lambda: _logits(model, tokens, [half])):
        raise UnsupportedModelError(
            f"exact=True: {model.name} ({kind}) computes with {operator}, whose bits depend on how "
            f"many tokens share a forward pass: load it without exact"
        )
    alone_NV = _logits(model, tokens, [1] * half)
    others = (
        _logits(model, tokens, [half]),
        _logits(model, tokens, [3, 1, 2]),
        _logits(model, tokens, [2] * 3, rows=3),
    )
    same = all(torch.equal(alone_NV, other) for other in others)
    if not same or not torch.equal(alone_NV[-1], _leaf_logits(model, tokens)):
        raise UnsupportedModelError(
            f"exact=True: {model.name} ({kind}) has layers whose bits depend on how many tokens "
            f"share a forward pass: load it without exact"
        )


def _use_kernels(model: HFModel, own: bool, exact: bool = False) -> None:
    # recurrent layers read some weights themselves, which they could not if packed
    compact = own and not isinstance(model, RecurrentModel)
    use_kernels(model.module, exact=exact, compact=compact)


def _compile(model: HFModel, own: bool, thorough: bool) -> None:
    if model.decoder_prompt is not None and model.device.type != "cpu":
        _warn(
            f"{model.name} is an encoder-decoder, which is compiled on a CPU only: it runs eagerly "
            f"on {model.device}"
        )
        return
    if isinstance(model, RecurrentModel):
        _warn(f"{model.name} is a recurrent model, which is not compiled yet: it runs eagerly")
        return
    make: Compiler = partial(compiled_program, own=own, thorough=thorough, device=model.device)
    read: SpanRule = min
    check: Check = compare
    if model.device.type == "cuda":
        use_fused_layers(model.module, model.name)
        model.plan = replace(model.plan, pool=BufferPool())
        graphs = partial(graphed, record=CudaRecorder(model.device), name=model.name)
        compiled = partial(_compiled_if_possible, make=make, name=model.name)
        make, read = (partial(graphs, make=compiled) if thorough else graphs), rounded_span
        check = compare if thorough else _no_difference
    eager = model.eager
    model.compiled = CompiledExecutor(
        eager.module,
        model.spec,
        model.name,
        make,
        read,
        model.exact,
        recording=eager.recording,
        check=check,
    )


def _compiled_if_possible(
    module: TreeForward, trace: Callable[[], ExportedProgram], *, make: Compiler, name: str
) -> Program:
    """The compiled program of a forward pass, or else its own code, after a warning."""
    try:
        return make(module, trace)
    except ProgramMissingError:
        raise
    except Exception as error:  # the compiler's own exceptions are of many kinds
        _warn(f"{name} does not compile, so its own kernels are captured: {first_line(error)}")
        return own_code(module)


def _no_difference(*_: object, **__: object) -> str:
    """What a model's own code says of its results."""
    return ""


def _logits(model: HFModel, tokens: list[int], widths: Sequence[int], rows: int = 1) -> Tensor:
    """Logits of the last row after each of the last tokens, (N, V), from forward passes over so
    many tokens each."""
    done = len(tokens) - sum(widths)
    context = unsampled_context(model, tokens, rows)
    cache = model.start(unsampled_context(model, tokens[: done + 1], rows))
    logits = []
    for width in widths:
        logits.append(model.extend(cache, context.tokens_BT[:, done : done + width])[-1])
        cache.append(width)
        done += width
    return torch.cat(logits)


def _leaf_logits(model: HFModel, tokens: list[int]) -> Tensor:
    """Logits after the last token, (V,), as the leaf of a tree in which a node of another branch
    precedes each node of its path."""
    half = len(tokens) // 2
    cache = model.start(unsampled_context(model, tokens[: half + 1]))
    path = tokens[half:]
    nodes_N = torch.arange(2 * len(path), device=model.device)
    sees_NN = (nodes_N <= nodes_N[:, None]) & (nodes_N % 2 == 1)
    sees_NN |= nodes_N == nodes_N[:, None]
    others = [(token + 1) % model.num_tokens for token in path]
    pairs = [token for pair in zip(others, path, strict=True) for token in pair]
    tokens_1N = torch.tensor([pairs], device=model.device)
    logits_1NV = model.extend(cache, tokens_1N, Nodes(sees_NN[None], nodes_N[None] // 2))
    return logits_1NV[0, -1]


def _warn(message: str) -> None:
    warnings.warn(message, OutriderWarning, stacklevel=3)

"""Early exit: the target's first layers draft, and its forward pass computes only the others.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024.
https://arxiv.org/abs/2404.16710

    draft     h = layers 0 … k-1,  q = head(norm(h));   h is kept
    target    p = head(norm(layers k … L-1 of h))

Both write their keys and values into one cache, each into the KV buffers of its own layers, so
nothing is computed twice.

The model is unmodified. Each half is a forward pass of a view of it (``views.py``), in which other
modules stand in for the layers that are left out and hand on the hidden state. Embedding,
positions, masks, norm and head are the model's own, whatever the family. The first half is asked
for the hidden states of layer k (``ForwardBatch.hidden_layers``); the second half goes on from
them, and finds them in the cache, which every layer is given. A model whose halves do not compute
what the whole computes is refused when it is built.

Legend: B rows, N nodes or query tokens, V vocabulary, H hidden width, L layers, k first ones.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from outrider.core.context import Context
from outrider.core.draft import Draft, Scores
from outrider.core.errors import InvalidParameterError, OutriderError, UnsupportedModelError
from outrider.core.health import deviation
from outrider.core.lengths import Lengths
from outrider.runtime.executors.eager import EagerExecutor
from outrider.runtime.executors.split_layers import FirstLayersExecutor, ResumingExecutor
from outrider.runtime.executors.traced_cache import TracedKVCache
from outrider.runtime.forward_batch import ForwardBatch, ForwardOutput
from outrider.runtime.hf.adapter import MARGIN, HFModel
from outrider.runtime.hf.hidden_states import decoder_layers
from outrider.runtime.hf.support import is_recurrent
from outrider.runtime.hf.views import StandIn, with_parts
from outrider.runtime.kv_cache.cache import PLAIN, KVCache
from outrider.runtime.kv_cache.storage import KVCachePlan
from outrider.runtime.prefill import unsampled_context


class SharedCache(KVCache):
    """A cache that draft and target share.

    Attributes:
        hidden: hidden states after the first layers, one (B, 1, H) per node of the last draft.
        tokens_BN: the tokens of that draft, once it is complete.
        resume_BNH: the hidden states that the target's next forward pass goes on from; None where
            it runs the first layers itself.
    """

    def __init__(
        self, context: Context, num_layers: int, limit: int, plan: KVCachePlan = PLAIN
    ) -> None:
        super().__init__(context, num_layers, limit, plan)
        self.hidden: list[Tensor] = []
        self.tokens_BN: Tensor | None = None
        self.resume_BNH: Tensor | None = None

    def rollback(self, lengths: Lengths) -> None:
        """Forgets slots as any KV cache does, and the hidden states of the last draft."""
        super().rollback(lengths)
        self.hidden, self.tokens_BN = [], None

    def hidden_of(self, draft: Draft) -> Tensor | None:
        """The hidden states of a draft, (B, N, H); None if the last draft was another."""
        kept = self.tokens_BN is draft.tokens_BN
        return torch.cat(self.hidden, 1) if kept else None


class ExitLayer(StandIn):
    """Stands for the last of the first layers. The compile cache knows programs by the names of
    the modules that they consist of, hence these classes and their representations."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        super().__init__(module, forward)
        self.layer = module  # its weights are part of the view

    def extra_repr(self) -> str:
        return "the last of the first layers"

    def __getattr__(self, name: str) -> Any:
        return self._modules[name] if name == "layer" else super().__getattr__(name)


class LeftOut(StandIn):
    """Stands for a layer, or a head, that a view leaves out."""

    def extra_repr(self) -> str:
        return f"without its {type(vars(self)['_replaced']).__name__}"


class Resumption(StandIn):
    """Stands for the exit layer where a view goes on from the hidden states after it."""

    def extra_repr(self) -> str:
        return "goes on from the exit layer's hidden states"


class SplitLayers:
    """The halves of a module: views of it that leave out the last layers, or the first.

    Args:
        module: the model.
        layers: its decoder layers.
        k: how many are first.
        num_tokens: width of the logits.

    Attributes:
        first: leaves out the layers from k on.
        first_without_head: the same, and all its logits are 0.
        rest: leaves out the first k layers, and goes on from what a shared cache resumes from.
    """

    def __init__(
        self, module: nn.Module, layers: Sequence[nn.Module], k: int, num_tokens: int
    ) -> None:
        tupled = False  # whether layers return tuples that begin with the hidden state

        def hand_on(hidden: Tensor | None, *args: object, **kwargs: object) -> Any:
            return (hidden,) if tupled else hidden

        def resume(hidden: Tensor, *args: object, **kwargs: object) -> Any:
            return hand_on(_shared(args, kwargs).resume_BNH)

        def leave(*args: Any, **kwargs: Any) -> Any:
            nonlocal tupled
            output = last(*args, **kwargs)
            tupled = isinstance(output, tuple)  # always the same for one model
            return output

        def no_logits(hidden: Tensor) -> Tensor:
            return hidden.new_zeros(*hidden.shape[:-1], num_tokens)

        last, head = layers[k - 1], module.get_output_embeddings()  # type: ignore[operator]
        exit_: dict[nn.Module, nn.Module] = {last: ExitLayer(last, leave)}
        exit_ |= {layer: LeftOut(layer, hand_on) for layer in layers[k:]}
        no_head = {head: LeftOut(head, no_logits)}
        entry: dict[nn.Module, nn.Module]
        entry = {layer: LeftOut(layer, hand_on) for layer in layers[: k - 1]}
        entry[last] = Resumption(last, resume)
        self.first = with_parts(module, exit_)
        self.first_without_head = with_parts(module, exit_ | no_head)
        self.rest = with_parts(module, entry)


class FirstLayers(HFModel):
    """The first layers with norm and head of the model: the draft model, in the target's cache or,
    as any draft model, in one of its own."""

    def __init__(self, target: HFModel, layers: SplitLayers, k: int) -> None:
        name = f"the first {k} layers of {target.name}"
        super().__init__(target.module, target.tokenizer, name)
        num_layers, self.num_layers, exact = self.num_layers, k, target.exact
        self.hidden_layers = layer = (k,)
        self.eager = EagerExecutor(layers.first, self.spec, num_layers, name, exact=exact)
        self._headless = EagerExecutor(
            layers.first_without_head, self.spec, num_layers, name, exact=exact
        )
        if target.compiled is not None:
            self.compiled = FirstLayersExecutor(
                target.compiled, self.eager, self._headless, name, layer
            )

    def forward(self, batch: ForwardBatch) -> ForwardOutput:
        if not isinstance(batch.cache, SharedCache):
            return super().forward(batch)
        output = super().forward(batch._replace(hidden_layers=self.hidden_layers))
        assert output.hidden_BNH is not None
        batch.cache.hidden.append(output.hidden_BNH)
        return output

    def eager_executor(self, batch: ForwardBatch) -> EagerExecutor:
        return self.eager if batch.needs_logits else self._headless

    def read(self, cache: SharedCache, token_B1: Tensor) -> None:
        """Runs the layers over a token without computing logits."""
        self.forward(ForwardBatch(cache, token_B1, needs_logits=False))


class EarlyExit(HFModel):
    """A target whose forward pass over a draft of its own first layers computes only the others.

    Any other draft takes a forward pass of all layers.

    Args:
        target: the model, decoder-only; its module is used as it is.
        k: the exit layer: how many layers draft, from 1 to L-1.

    Attributes:
        k: the exit layer.
        first: the draft model.

    Raises:
        InvalidParameterError: an exit layer outside the model.
        UnsupportedModelError: a model whose layers cannot be split so.
    """

    def __init__(self, target: HFModel, k: int) -> None:
        if target.module.config.is_encoder_decoder:
            raise UnsupportedModelError(
                f"{target.name} is an encoder-decoder, whose decoder does not exit early here: "
                f"take a decoder-only model"
            )
        if is_recurrent(target.module.config):
            raise UnsupportedModelError(
                f"{target.name} ({type(target.module).__name__}) has recurrent layers, whose "
                f"states draft and target cannot share: take another method"
            )
        if target.original is not None:
            raise UnsupportedModelError(
                f"{target.name} has LongRoPE: beyond {target.original} tokens all keys get other "
                f"factors, and the first layers cannot recompute theirs alone: take another method"
            )
        super().__init__(target.module, target.tokenizer, target.name)
        self.exact = target.exact
        if isinstance(k, bool) or not isinstance(k, int) or not 0 < k < self.num_layers:
            raise InvalidParameterError(
                f"layer={k!r}: {target.name} has {self.num_layers} layers; the exit is after "
                f"layer 1 to {self.num_layers - 1}"
                if self.num_layers > 1
                else f"layer={k!r}: {target.name} has one layer, which cannot be split"
            )
        self.k = k
        self._caches: WeakValueDictionary[int, SharedCache] = WeakValueDictionary()
        layers = SplitLayers(self.module, self._decoder_layers(), k, self.num_tokens)
        self._rest = EagerExecutor(
            layers.rest, self.spec, self.num_layers, self.name, exact=self.exact
        )
        self.first = FirstLayers(target, layers, k)
        self._prove()  # eagerly, which also shows what the layers return
        if target.compiled is not None:
            self.compiled = ResumingExecutor(target.compiled, self.eager, self._rest)
        self.first = FirstLayers(target, layers, k)  # with its clock at zero

    def cache_of(self, context: Context) -> SharedCache | None:
        """The cache of a batch that this model has started; None if it has not."""
        return self._caches.get(id(context))  # which the cache keeps alive

    def score(self, cache: KVCache, draft: Draft) -> Scores:
        assert isinstance(cache, SharedCache)
        cache.resume_BNH = cache.hidden_of(draft)
        cache.rollback(cache.context.sequence_lengths - 1)  # the other layers have not seen it
        try:
            return super().score(cache, draft)
        finally:
            cache.resume_BNH = None

    def eager_executor(self, batch: ForwardBatch) -> EagerExecutor:
        cache = batch.cache
        resumes = isinstance(cache, SharedCache) and cache.resume_BNH is not None
        return self._rest if resumes else self.eager

    def further_forwards(self) -> Sequence[tuple[str, Callable[[], None]]]:
        return (
            ("forward passes without a head", self._run_first),
            ("forward passes of the remaining layers", self._run_rest),
        )

    @torch.inference_mode()
    def _run_first(self) -> None:
        """Runs the first layers over a token, without their head."""
        context = unsampled_context(self, [0, 0, 0])
        cache = self.start(context)
        assert isinstance(cache, SharedCache)
        self.first.read(cache, context.tokens_BT[:, :1])

    @torch.inference_mode()
    def _run_rest(self) -> None:
        """Runs the first layers over two tokens, and then the others."""
        context = unsampled_context(self, [0, 0, 0])
        cache, tokens_BN = self.start(context), context.tokens_BT[:, :2]
        assert isinstance(cache, SharedCache)
        self.first.extend(cache, tokens_BN)
        (cache.resume_BNH,) = cache.hidden
        self.extend(cache, tokens_BN)

    def _cache(self, context: Context) -> SharedCache:
        cache = SharedCache(context, self.num_layers, self.limit + MARGIN, self.plan)
        self._caches[id(context)] = cache
        return cache

    def _decoder_layers(self) -> Sequence[nn.Module]:
        try:
            return decoder_layers(self.module, self.num_layers, self.name)
        except UnsupportedModelError:
            raise UnsupportedModelError(
                f"{self.name} ({type(self.module).__name__}) keeps its layers in no list of "
                f"{self.num_layers}, so it cannot exit early: take another method"
            ) from None

    @torch.inference_mode()
    def _prove(self) -> None:
        """Runs a few tokens through the whole model and through its halves."""
        tokens = list(range(min(4, self.num_tokens)))
        tokens_BN = torch.tensor([tokens], device=self.device)
        context = unsampled_context(self, tokens)
        whole_BNV = self.extend(self._cache(context), tokens_BN)
        try:
            halves_BNV = self._by_halves(context, tokens_BN)
        except OutriderError:
            raise
        except Exception as error:  # the model's own, which are of many kinds
            raise self._inseparable(f"{type(error).__name__}: {error}") from error
        off, scale = deviation(halves_BNV, whole_BNV)
        if not off <= 64 * torch.finfo(self.dtype).eps * scale:
            raise self._inseparable(f"logits differ by {off:.2g}")

    def _by_halves(self, context: Context, tokens_BN: Tensor) -> Tensor:
        """Logits (B, N, V) of a few tokens by the first layers and then the others."""
        cache = self._cache(context)
        self.first.without_compiled().extend(cache, tokens_BN)
        (hidden_BNH,) = cache.hidden
        if hidden_BNH.shape[:-1] != tokens_BN.shape:
            raise self._inseparable(f"they pass on {tuple(hidden_BNH.shape)} numbers for one row")
        cache.resume_BNH = hidden_BNH
        return self.extend(cache, tokens_BN)

    def _inseparable(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.name} ({type(self.module).__name__}) cannot exit early: its layers from "
            f"{self.k} on need more than the hidden state of those before "
            f"({reason}); take another method"
        )


def _shared(args: Sequence[object], kwargs: Mapping[str, object]) -> SharedCache | TracedKVCache:
    """The cache among a layer's arguments, whose name differs between families."""
    given = (*args, *kwargs.values())
    kinds = SharedCache, TracedKVCache
    cache = next((argument for argument in given if isinstance(argument, kinds)), None)
    assert cache is not None
    return cache

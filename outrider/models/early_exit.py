"""A target that lends its first layers to a drafter and computes only the others itself.

Elhoushi et al., "LayerSkip: Enabling Early Exit Inference and Self-Speculative Decoding", ACL 2024.
https://arxiv.org/abs/2404.16710

    draft     h = layers 0 … k-1,  q = head(norm(h));   h is kept
    target    p = head(norm(layers k … L-1 of h))

Both write their keys and values into one cache, each into the slabs of its own layers: nothing is
computed twice.

The model is unmodified. A pass is the model's own forward pass, in which the layers to leave out
are told, on the loaded instance and for its duration, to hand on a hidden state instead. Embedding,
positions, masks, norm and head stay the model's own, whatever the family. That the two halves make
the whole is not assumed: a model is put to the test when it is built, and refused if they do not.

Legend: B rows, N nodes or columns of a pass, V vocabulary, H hidden width, L layers, k first ones.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from weakref import WeakSet

import torch
from torch import Tensor, nn

from outrider.core.context import Context
from outrider.core.draft import Draft
from outrider.core.errors import InvalidParameterError, OutriderError, UnsupportedModelError
from outrider.core.protocols import Scores
from outrider.models.cache import PLAIN, SlabCache
from outrider.models.health import deviation
from outrider.models.hf import MARGIN, HFModel
from outrider.models.slabs import SlabPlan


class SplitLayers:
    """The decoder layers of a module, of which a pass may leave out the first k or the others.

    Args:
        module: the model.
        layers: its decoder layers.
        k: how many are first.

    Attributes:
        tupled: whether a layer returns a tuple that begins with the hidden state.
    """

    def __init__(self, module: nn.Module, layers: Sequence[nn.Module], k: int) -> None:
        self.head: Any = module.get_output_embeddings()  # type: ignore[operator]
        config: Any = module.config
        self.num_tokens: int = config.get_text_config().vocab_size
        self.first, self.rest = list(layers[:k]), list(layers[k:])
        self.tupled = False

    @contextmanager
    def only_first(self) -> Iterator[list[Tensor]]:
        """Leaves out the layers from k on; the list gets the hidden state (B, N, H) behind k-1."""
        seen: list[Tensor] = []

        def hand_on(hidden: Tensor, *args: object, **kwargs: object) -> Any:
            seen[:] = [hidden]
            return (hidden,) if self.tupled else hidden

        with _doing(self.rest, hand_on):
            yield seen

    @contextmanager
    def only_rest(self, hidden_BNH: Tensor) -> Iterator[None]:
        """Leaves out the first layers, and goes on from what they once made."""

        def hand_on(hidden: Tensor, *args: object, **kwargs: object) -> Any:
            return (hidden_BNH,) if self.tupled else hidden_BNH

        with _doing(self.first, hand_on):
            yield

    @contextmanager
    def no_head(self) -> Iterator[None]:
        """Leaves out the head; all logits are 0."""
        width = self.num_tokens
        with _doing([self.head], lambda hidden: hidden.new_zeros(*hidden.shape[:-1], width)):
            yield


@contextmanager
def _doing(modules: Sequence[nn.Module], forward: Callable[..., Any]) -> Iterator[None]:
    """Modules that do something else for a while; hooks of others are put back."""
    before = [vars(module).get("forward") for module in modules]
    for module in modules:
        vars(module)["forward"] = forward
    try:
        yield
    finally:
        for module, old in zip(modules, before, strict=True):
            if old is None:
                del vars(module)["forward"]
            else:
                vars(module)["forward"] = old


class SharedCache(SlabCache):
    """A cache that draft and target share.

    Attributes:
        hidden: behind the first layers, one (B, 1, H) per node of the last draft.
        tokens_BN: the tokens of that draft, once it is complete.
    """

    def __init__(
        self, context: Context, num_layers: int, limit: int, plan: SlabPlan = PLAIN
    ) -> None:
        super().__init__(context, num_layers, limit, plan)
        self.hidden: list[Tensor] = []
        self.tokens_BN: Tensor | None = None

    def rewind(self) -> None:
        """Back to the committed tokens, all but the root."""
        self.lengths = [length - 1 for length in self.context.lengths]
        self.length_B = self.context.length_B - 1

    def forget(self) -> None:
        """Drops what was kept of the last draft."""
        self.hidden, self.tokens_BN = [], None

    def hidden_of(self, draft: Draft) -> Tensor | None:
        """What was kept of a draft, (B, N, H); None if it is another."""
        kept = self.tokens_BN is draft.tokens_BN
        return torch.cat(self.hidden, 1) if kept else None


class FirstLayers(HFModel):
    """The first layers with norm and head of the model: the draft, in the target's cache or, as any
    draft model, in one of its own."""

    def __init__(self, target: HFModel, layers: SplitLayers) -> None:
        name = f"the first {len(layers.first)} layers of {target.name}"
        super().__init__(target.module, target.tokenizer, name)
        self.exact = target.exact
        self.num_layers = len(layers.first)
        self._layers = layers

    def read(self, cache: SlabCache, token_B1: Tensor) -> None:
        """Passes a token through the layers without asking what comes next."""
        with self._layers.no_head():
            self.extend(cache, token_B1)

    def _forward(self, cache: SlabCache, *arguments: Any) -> Tensor:
        with self._layers.only_first() as seen:
            logits_BNV = super()._forward(cache, *arguments)
        if isinstance(cache, SharedCache):
            cache.hidden += seen
        return logits_BNV


class EarlyExit(HFModel):
    """A target whose pass over a draft of its own first layers computes only the others.

    Any other draft takes a whole pass.

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
        if target.original is not None:
            raise UnsupportedModelError(
                f"{target.name} has LongRoPE: beyond {target.original} tokens all keys get other "
                f"factors, and the first layers cannot recompute theirs alone: take another method"
            )
        super().__init__(target.module, target.tokenizer, target.name)
        self.exact = target.exact
        if isinstance(k, bool) or not isinstance(k, int) or not 0 < k < self.num_layers:
            raise InvalidParameterError(
                f"layer={k!r}: {target.name} has {self.num_layers} layers; the exit is behind "
                f"layer 1 to {self.num_layers - 1}"
                if self.num_layers > 1
                else f"layer={k!r}: {target.name} has one layer, which cannot be split"
            )
        self.k = k
        self._layers = SplitLayers(self.module, self._decoder_layers(), k)
        self._caches: WeakSet[SharedCache] = WeakSet()
        self.first = FirstLayers(target, self._layers)
        self._prove()
        self.first = FirstLayers(target, self._layers)  # with clock and sums at zero

    def cache_of(self, context: Context) -> SharedCache | None:
        """The cache of a batch that this model has started; None if it has not."""
        return next((cache for cache in self._caches if cache.context is context), None)

    def score(self, cache: SlabCache, draft: Draft) -> Scores:
        assert isinstance(cache, SharedCache)
        cache.rewind()
        hidden_BNH = cache.hidden_of(draft)
        cache.forget()
        if hidden_BNH is None:
            return super().score(cache, draft)
        with self._layers.only_rest(hidden_BNH):
            return super().score(cache, draft)

    def _cache(self, context: Context) -> SharedCache:
        cache = SharedCache(context, self.num_layers, self.limit + MARGIN, self.plan)
        self._caches.add(cache)
        return cache

    def _decoder_layers(self) -> Sequence[nn.Module]:
        for module in self.module.modules():  # the outermost list comes first
            if isinstance(module, nn.ModuleList) and len(module) == self.num_layers:
                return list(module)
        raise UnsupportedModelError(
            f"{self.name} ({type(self.module).__name__}) keeps its layers in no list of "
            f"{self.num_layers}, so it cannot exit early: take another method"
        )

    @torch.inference_mode()
    def _prove(self) -> None:
        """Runs a few tokens through the whole and through the halves."""
        tokens_BN = torch.arange(min(4, self.num_tokens), device=self.device)[None]
        none: Any = None
        context = Context.start(tokens_BN.tolist(), none, [0], [0], self.device)
        outputs: list[object] = []
        hook = self._layers.first[0].register_forward_hook(lambda *call: outputs.append(call[2]))
        whole_BNV = self.extend(self._cache(context), tokens_BN)
        hook.remove()
        self._layers.tupled = isinstance(outputs[0], tuple)
        try:
            halves_BNV = self._by_halves(context, tokens_BN)
        except OutriderError:
            raise
        except Exception as error:  # the model's own, which are of many kinds
            raise self._inseparable(f"{type(error).__name__}: {error}") from error
        self._sums.clear()
        off, scale = deviation(halves_BNV, whole_BNV)
        if not off <= 64 * torch.finfo(self.dtype).eps * scale:
            raise self._inseparable(f"logits differ by {off:.2g}")

    def _by_halves(self, context: Context, tokens_BN: Tensor) -> Tensor:
        """Logits of a few tokens by the first layers and then the others, (B, N, V)."""
        cache = self._cache(context)
        self.first.extend(cache, tokens_BN)
        shape = cache.hidden[0].shape
        if shape[:-1] != tokens_BN.shape:
            raise self._inseparable(f"they pass on {tuple(shape)} numbers for one row")
        with self._layers.only_rest(cache.hidden[0]):
            return self.extend(cache, tokens_BN)

    def _inseparable(self, reason: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.name} ({type(self.module).__name__}) cannot exit early: its layers from "
            f"{len(self._layers.first)} on need more than the hidden state of those before "
            f"({reason}); take another method"
        )

"""How KV buffers store numbers: the stated errors; a cache of any kind is one of what it stores.

Legend: B rows, H heads, N columns, C width of a head.
"""

import pytest
import torch
from tiny_models import (
    FAMILIES,
    VOCAB,
    engine_of,
    greedy,
    ragged_prompts,
    tiny,
    token_ids,
    uniform_method,
)
from tiny_seq2seq import tiny_seq2seq
from torch import Tensor

from outrider.core import Context, Draft, Lengths, Verdict, keep_accepted
from outrider.core.errors import InvalidParameterError, NonFiniteLogitsError
from outrider.runtime import HFModel, KVCache
from outrider.runtime.kv_cache.storage import KVCachePlan, KvDtype, KVLayout
from outrider.testing import SoftmaxDistribution, check_model

H, C = 2, 8
LOWER: tuple[KvDtype, ...] = ("bfloat16", "int8")


def stored(x_BHNC: Tensor, kv_dtype: KvDtype) -> Tensor:
    """What is read of what was written."""
    storage = KVCachePlan(kv_dtype).storage
    return storage.decode(storage.encode(x_BHNC), x_BHNC.dtype)


def vectors(dtype: torch.dtype) -> Tensor:
    """Vectors of all sizes, some with one number that outweighs the others, some zero."""
    generator = torch.Generator().manual_seed(0)
    x_BHNC = torch.randn(40, 16, 50, C, generator=generator, dtype=torch.float64)
    x_BHNC *= 10.0 ** torch.randint(-20, 20, (40, 16, 50, 1), generator=generator)
    x_BHNC[:5, :, :, 0] *= 1000
    x_BHNC[5] = 0
    return x_BHNC.to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_int8_is_within_its_bound(dtype: torch.dtype) -> None:
    """max|x| / 254 per vector, and what rounding in float32 adds; reached within one percent."""
    x_BHNC = vectors(dtype)
    error_BHNC = (stored(x_BHNC, "int8") - x_BHNC).abs().double()
    most_BHN1 = x_BHNC.abs().amax(-1, keepdim=True).double()
    assert bool((error_BHNC <= most_BHN1 * (1 / 254 + 2**-22)).all())
    assert float((error_BHNC / most_BHN1.clamp(min=1e-300)).max()) > 0.99 / 254


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_bfloat16_is_within_its_bound(dtype: torch.dtype) -> None:
    """2^-8 of each number; reached within one percent. 2^-9 would be too little."""
    x_BHNC = vectors(dtype)
    error_BHNC = (stored(x_BHNC, "bfloat16") - x_BHNC).abs()
    assert bool((error_BHNC <= x_BHNC.abs() * 2**-8).all())
    assert float((error_BHNC / x_BHNC.abs().clamp(min=1e-30)).max()) > 0.99 * 2**-8


def test_int8_for_a_model_in_bfloat16_adds_that_rounding_only() -> None:
    x_BHNC = vectors(torch.bfloat16)
    error_BHNC = (stored(x_BHNC, "int8").double() - x_BHNC.double()).abs()
    most_BHN1 = x_BHNC.double().abs().amax(-1, keepdim=True)
    assert bool((error_BHNC <= most_BHN1 * (1 / 254 + 2**-8 + 2**-15)).all())


@pytest.mark.parametrize("kv_dtype", LOWER)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
def test_what_is_not_finite_stays_so(kv_dtype: KvDtype, bad: float) -> None:
    """So that damaged weights are still found."""
    x_BHNC = torch.ones(1, 1, 2, C)
    x_BHNC[0, 0, 0, 3] = bad
    read_BHNC = stored(x_BHNC, kv_dtype)
    assert not bool(read_BHNC[0, 0, 0].isfinite().all())
    torch.testing.assert_close(read_BHNC[0, 0, 1], x_BHNC[0, 0, 1])


def test_other_kinds_are_refused() -> None:
    with pytest.raises(InvalidParameterError, match="one of auto, bfloat16, int8"):
        engine_of(tiny(), kv_dtype="int4")


def kv_cache(lengths: list[int], kv_dtype: KvDtype) -> KVCache:
    prompts = ragged_prompts(lengths)
    context = Context.start(prompts, SoftmaxDistribution(), [0] * len(prompts), range(len(prompts)))
    return KVCache(context, 2, 10**6, KVCachePlan(kv_dtype))


def write(cache: KVCache, x_BHNC: Tensor, layer: int = 0) -> list[Tensor]:
    """A pass; copies of what it reads, since a plain cache hands out views."""
    cache.begin(x_BHNC.shape[2])
    return [read_BHSC.clone() for read_BHSC in cache.update(x_BHNC, -2 * x_BHNC, layer)]


def journey(kv_dtype: KvDtype, before: KvDtype = "auto") -> list[Tensor]:
    """Everything that can happen to a cache; what is read on the way. What is written is first
    stored the way ``before`` says."""
    generator = torch.Generator().manual_seed(1)

    def new(B: int, N: int) -> Tensor:
        return stored(torch.randn(B, H, N, C, generator=generator), before)

    cache = kv_cache([70, 70, 70], kv_dtype)
    read = write(cache, new(3, 60))
    cache.append(Lengths.of([60, 57, 33]))
    read += write(cache, new(3, 9))  # ragged, and the KV buffer grows
    parents_BN = torch.tensor([[-1, 0, 0, 2, 1, 3, 3, 6, 7]] * 3)
    tokens_BN, mask_BN = torch.zeros_like(parents_BN), torch.ones(3, 9, dtype=torch.bool)
    draft = Draft(tokens_BN, parents_BN, mask_BN, None, "chosen")
    path_BD = torch.tensor([[2, 3, 6, 7, 8], [1, 4, 8, 8, 8], [2, 2, 2, 2, 2]])
    verdict = Verdict(path_BD, torch.tensor([5, 2, 1]), torch.zeros(3).long())
    keep_accepted(cache, draft, verdict.read())
    read += write(cache, new(3, 2))
    cache.keep([2, 1])
    newcomers = kv_cache([140], kv_dtype)
    write(newcomers, new(1, 140))
    newcomers.append(140)
    cache.join(newcomers)
    return [*read, *write(cache, new(3, 1))]


@pytest.mark.parametrize("kv_dtype", LOWER)
def test_a_cache_is_a_plain_cache_of_what_is_stored(kv_dtype: KvDtype) -> None:
    """Growing, ragged writes, trees, rows that leave and join: to the bit, slot by slot. Slots
    that no row has written are zero in both."""
    for mine, plain in zip(journey(kv_dtype), journey("auto", kv_dtype), strict=True):
        assert torch.equal(mine, plain)


@pytest.mark.parametrize("kv_dtype", ["auto", *LOWER])
def test_bytes_of_a_token(kv_dtype: KvDtype) -> None:
    cache = kv_cache([64], kv_dtype)
    for layer in range(2):
        write(cache, torch.ones(1, H, 64, C), layer)
    width = {"auto": 4 * C, "bfloat16": 2 * C, "int8": C + 4}[kv_dtype]
    assert cache.num_bytes() == 64 * 2 * 2 * H * width


@pytest.mark.parametrize("kv_dtype", ["auto", *LOWER])
def test_what_is_reserved_does_not_grow(kv_dtype: KvDtype) -> None:
    cache = kv_cache([5, 5], kv_dtype)
    shapes = ((H, C, C),) * 2
    cache.reserve(2, 100, KVLayout(shapes, torch.float32, torch.device("cpu")))
    assert cache.keys[1] is not None
    before, address = cache.num_bytes(), cache.keys[1].data_ptr()
    assert cache.keys[1].shape == (2, H, 128, C)
    for layer in range(2):
        write(cache, torch.ones(2, H, 128, C), layer)
    assert cache.keys[1] is not None
    assert (cache.num_bytes(), cache.keys[1].data_ptr()) == (before, address)


@pytest.mark.parametrize("kv_dtype", LOWER)
@pytest.mark.parametrize("family", ["llama", "gemma3"])
def test_contract(family: str, kv_dtype: KvDtype) -> None:
    """Commit, then score, equals recomputing; batches, trees and sliding windows included."""
    model = tiny(family, dtype=torch.float64).with_kv_dtype(kv_dtype)
    with torch.inference_mode():
        check_model(model, VOCAB, prompts=ragged_prompts([1, 5, 3, 19]), atol=1e-5)


@pytest.mark.parametrize("kv_dtype", LOWER)
@pytest.mark.parametrize("family", sorted({*FAMILIES} - {"mixtral"}))
def test_greedy_text_is_that_of_the_target_with_its_buffers(family: str, kv_dtype: KvDtype) -> None:
    """Chains and trees of drafts, rows of all lengths. (Mixtral's experts compute in float32,
    where rounding now and then crosses a step.)"""
    target = tiny(family, dtype=torch.float64)
    draft = tiny(family, dtype=torch.float64, std=0.28)
    prompts = ragged_prompts([1, 14, 5, 23])
    plain = engine_of(target, kv_dtype=kv_dtype).generate(prompts, greedy(20))
    for drafter, method in ((draft, "speculative"), (None, uniform_method(width=3))):
        engine = engine_of(target, drafter, method, γ=5, kv_dtype=kv_dtype, max_batch_size=3)
        assert token_ids(engine.generate(prompts, greedy(20))) == token_ids(plain)


@pytest.mark.parametrize("method", ["top-k-tree", "early-exit", "staged"])
def test_methods_in_int8(method: str) -> None:
    target = tiny(dtype=torch.float64, std=0.2)
    draft = tiny(dtype=torch.float64, std=0.18)
    prompts, num = ragged_prompts([9, 1, 17]), greedy(18)
    plain = engine_of(target, kv_dtype="int8").generate(prompts, num)
    if method == "mjsd":
        plain = engine_of(
            target.with_kv_dtype("int8"), draft.with_kv_dtype("int8"), method
        ).generate(prompts, num)
    engine = engine_of(target, draft, method, kv_dtype="int8")
    assert token_ids(engine.generate(prompts, num)) == token_ids(plain)
    held = {model.plan.kv_dtype for model in (engine.target, *engine.drafter.capabilities.models)}
    assert held == {"int8"}


def test_the_drafts_buffers_change_no_text() -> None:
    target = tiny(dtype=torch.float64, std=0.2)
    draft = tiny(dtype=torch.float64, std=0.19)
    prompts, num = ragged_prompts([9, 1, 17]), greedy(30)
    exact = engine_of(target, draft).generate(prompts, num)
    lower = engine_of(target, draft.with_kv_dtype("int8")).generate(prompts, num)
    assert token_ids(lower) == token_ids(exact)
    assert lower.stats.accepted > 30


@pytest.mark.parametrize("kv_dtype", LOWER)
@pytest.mark.parametrize("family", ["t5", "bart"])
def test_encoder_decoders(family: str, kv_dtype: KvDtype) -> None:
    """The decoder's own KV buffers; the sources' stay as the model computes them."""
    target = tiny_seq2seq(family, dtype=torch.float64)
    draft = tiny_seq2seq(family, dtype=torch.float64, std=0.19)
    prompts = ragged_prompts([3, 20, 9])
    plain = engine_of(target, kv_dtype=kv_dtype).generate(prompts, greedy(15))
    engine = engine_of(target, draft, kv_dtype=kv_dtype, max_batch_size=2)
    assert token_ids(engine.generate(prompts, greedy(15))) == token_ids(plain)


def test_engines_of_the_same_models_do_not_share_buffers() -> None:
    target = tiny(dtype=torch.float64)
    assert engine_of(target, kv_dtype="int8").target.plan.kv_dtype == "int8"
    assert engine_of(target).target is target
    assert target.plan == KVCachePlan()
    assert engine_of(target.with_kv_dtype("int8")).target.plan.kv_dtype == "int8"


def test_damaged_weights_are_found_in_int8() -> None:
    target = tiny()
    with torch.no_grad():
        next(target.module.parameters())[7] = torch.nan
    with pytest.raises(NonFiniteLogitsError):
        engine_of(HFModel(target.module), kv_dtype="int8").generate([[1, 7, 2, 3]], greedy(3))


def test_the_models_own_precision_replaces_another_one() -> None:
    """Asking for bfloat16 means plain buffers in a bfloat16 model, whatever they were before."""
    model = tiny(dtype=torch.bfloat16).with_kv_dtype("int8")
    assert model.with_kv_dtype("auto").plan.kv_dtype == "int8"
    assert model.with_kv_dtype("bfloat16").plan.kv_dtype == "auto"

"""Tiny ``transformers`` models with random weights, and helpers for tests that use them.

Weights have a large variance and embeddings are untied, so that outputs vary: with the usual
initialisation such a small model repeats one token for ever, and most errors would not show.

Legend: T tokens.
"""

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider import Engine, Result, Results, Sampling
from outrider.core import (
    Budget,
    Capabilities,
    Context,
    Draft,
    Drawn,
    Role,
    Scores,
    Stream,
    Verdict,
    draw,
)
from outrider.methods import METHODS, Method
from outrider.runtime import HFModel
from outrider.verifiers import Rejection

DEVICE = torch.device(os.environ.get("OUTRIDER_TEST_DEVICE", "cpu"))
"""Where models of tests are."""

VOCAB = 101
WINDOW = 8

_COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 128,
}
_GQA = {"num_key_value_heads": 2, "head_dim": 8}
_SLIDING = {"sliding_window": WINDOW}

FAMILIES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "llama": ("LlamaConfig", "LlamaForCausalLM", _COMMON | _GQA),
    "qwen3": ("Qwen3Config", "Qwen3ForCausalLM", _COMMON | _GQA),
    "gpt2": (
        "GPT2Config",
        "GPT2LMHeadModel",
        {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 128},
    ),
    "opt": ("OPTConfig", "OPTForCausalLM", _COMMON | {"ffn_dim": 48, "word_embed_proj_dim": 32}),
    "gpt_neox": ("GPTNeoXConfig", "GPTNeoXForCausalLM", _COMMON),
    "gemma2": ("Gemma2Config", "Gemma2ForCausalLM", _COMMON | _GQA | _SLIDING),
    "gemma3": (
        "Gemma3TextConfig",
        "Gemma3ForCausalLM",
        _COMMON
        | _GQA
        | _SLIDING
        | {
            "num_hidden_layers": 3,
            "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
        },
    ),
    "mistral": ("MistralConfig", "MistralForCausalLM", _COMMON | _GQA | _SLIDING),
    "mixtral": (
        "MixtralConfig",
        "MixtralForCausalLM",
        _COMMON | _GQA | {"num_local_experts": 4, "num_experts_per_tok": 2},
    ),
}

SLIDING = ("gemma2", "gemma3", "mistral")


def tiny_module(
    family: str = "llama",
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    std: float = 0.3,
    **overrides: Any,
) -> PreTrainedModel:
    """A random model of a family, without an end-of-sequence token unless one is given."""
    config_name, model_name, settings = FAMILIES[family]
    special = {"eos_token_id": None, "bos_token_id": None, "pad_token_id": None}
    settings = settings | special | {"tie_word_embeddings": False} | overrides
    config = getattr(transformers, config_name)(**settings)
    if family in ("gemma2",):
        config._attn_implementation = "eager"  # the soft cap, as ``load_model`` has it
    module: PreTrainedModel = getattr(transformers, model_name)(config)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.ndim > 1:
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
    return module.to(DEVICE, dtype).eval()


def tiny(family: str = "llama", seed: int = 0, name: str = "model", **settings: Any) -> HFModel:
    """The same, ready to score."""
    return HFModel(tiny_module(family, seed, **settings), name=name)


COMPILED: dict[str, Any] = {
    "vocab_size": 300,
    "num_hidden_layers": 1,
    "max_position_embeddings": 256,
}
"""Sizes of models that tests compile for real: few of them, so that these tests find each other's
programs in the cache folder."""


def save_compiled(folder: Path, seed: int) -> Path:
    """Saves a Llama of these sizes; returns the folder. What is loaded from it has one program in
    all tests: its configuration is part of the program's key, and saving adds to it."""
    tiny_module(seed=seed, **COMPILED).save_pretrained(folder)
    return folder


def ragged_prompts(
    lengths: Sequence[int], num_tokens: int = VOCAB, seed: int = 0
) -> list[list[int]]:
    """Random token ids."""
    generator = torch.Generator().manual_seed(seed)
    return [
        torch.randint(num_tokens, (length,), generator=generator).tolist() for length in lengths
    ]


def engine_of(
    target: HFModel,
    draft: HFModel | None = None,
    method: str | Method | None = None,
    γ: int = 4,
    **settings: Any,
) -> Engine:
    """An engine; by default speculative where there is a draft model, else plain. A method that
    drafts with a head gets a random one for the target."""
    if method is None:
        method = "plain" if draft is None else "speculative"
    row = METHODS[method] if isinstance(method, str) else method
    given = random_head(row.needs_head, target) if row.needs_head else draft
    return Engine(target, given, row, num_speculative_tokens=γ, **settings)


def random_head(kind: str, target: HFModel) -> Any:
    """A random head of a kind for a target."""
    from tiny_heads import RANDOM_HEADS

    return RANDOM_HEADS[kind](target)


def token_ids(results: Results | Sequence[Result]) -> list[tuple[int, ...]]:
    """The tokens of each result."""
    return [result.token_ids for result in results]


def greedy(num: int, **settings: Any) -> Sampling:
    """Temperature 0 for the given number of tokens; end tokens are ignored."""
    return Sampling(temperature=0, max_new_tokens=num, ignore_eos=True, **settings)


def hf_generate(module: PreTrainedModel, prompt: Sequence[int], num: int, **settings: Any) -> tuple:
    """Greedy continuation by ``transformers``, of one prompt alone."""
    ids = torch.tensor([list(prompt)], device=module.device)
    done = module.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=num,
        do_sample=False,
        pad_token_id=0,
        **settings,
    )
    return tuple(done[0, len(prompt) :].tolist())


def with_various_norms(family: str, dtype: torch.dtype) -> Any:
    """A model whose norms and biases differ."""
    module = tiny_module(family, dtype=dtype)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in module.parameters():
            if parameter.dim() == 1:
                parameter += 0.3 * torch.randn(parameter.shape, generator=generator).to(dtype)
    return module


@torch.no_grad()
def full_logits(module: PreTrainedModel, tokens: Sequence[int]) -> Tensor:
    """Logits of one plain forward pass without any cache, (T, V)."""
    ids = torch.tensor([list(tokens)], device=module.device)
    return module(input_ids=ids, use_cache=False).logits[0].cpu()


class NoMemory:
    """State of a stateless drafter."""

    def keep(self, rows: Sequence[int]) -> None:
        """Nothing to keep."""


@dataclass(frozen=True)
class UniformDrafter:
    """Drafts tokens from the uniform distribution: a chain, or a tree with ``width`` children per
    node."""

    num_tokens: int
    width: int = 1
    drawn: Drawn = "iid"

    @property
    def capabilities(self) -> Capabilities:
        return Capabilities(drafts_trees=self.width > 1)

    def start(self, context: Context) -> NoMemory:
        return NoMemory()

    def propose(self, state: NoMemory, context: Context, budget: Budget, rng: Stream) -> Draft:
        B, N, device = context.num_rows, budget.max_tokens + 1, context.root_B.device
        q_V = torch.full((self.num_tokens,), 1 / self.num_tokens, dtype=torch.float64).to(device)
        u_BD = rng.uniform(Role.DRAFT, max(N - 1, 1))
        tokens = [draw(q_V.expand(B, -1), u_B) for u_B in u_BD[:, : N - 1].unbind(1)]
        tokens_BN = torch.stack([context.root_B, *tokens], 1)
        mask_BN = torch.ones_like(tokens_BN, dtype=torch.bool)
        if budget.tokens_B is not None:
            mask_BN = torch.arange(N, device=device) <= budget.tokens_B[:, None]
        probs_BNV = q_V.expand(B, N, -1)
        if self.width == 1:
            return Draft.chain(tokens_BN, mask_BN, probs_BNV, "iid")
        parents_BN = (torch.arange(-1, N - 1, device=device) // self.width).expand(B, N)
        return Draft(tokens_BN, parents_BN, mask_BN, probs_BNV, "iid")

    def commit(self, state: NoMemory, draft: Draft, verdict: Verdict, scores: Scores) -> None:
        """Nothing to learn."""

    def join(self, state: NoMemory, other: NoMemory) -> None:
        """Nothing to join."""


def uniform_method(width: int = 1) -> Method:
    """Random drafts, as a method of the engine."""
    return Method(
        "uniform",
        "Random drafts.",
        "tests",
        "nothing",
        Rejection,
        lambda parts: UniformDrafter(parts.target.num_tokens, width),
    )


def byte_tokenizer(
    words: Sequence[str] = ("def f(x):\n    return x + 1\n", "print(hello world)"),
    num_tokens: int = 280,
) -> PreTrainedTokenizerBase:
    """A byte-level BPE trained on a few words; token 0 is the end token."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=num_tokens,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<eos>"],
        show_progress=False,
    )
    tokenizer.train_from_iterator(list(words) * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")


class ForcedTokens:
    """A logits processor that forces the tokens after a prompt.

    It applies to draft and target alike, so all tokens of a draft model are accepted, and words are
    split between rounds; with :func:`uniform_method` every round emits one token.
    """

    def __init__(self, prompt: Sequence[int], script: Sequence[int]) -> None:
        self.first, self.script = len(prompt), list(script)

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        index = min(input_ids.shape[1] - self.first, len(self.script) - 1)
        forced = torch.full_like(scores, -torch.inf)
        forced[:, self.script[index]] = 0.0
        return forced

"""Tokenizers of the kinds that models use, trained on a few sentences.

They differ in everything that makes vocabularies hard to compare: how a space is encoded, how a
string begins, and how capitals, line breaks and letters outside the vocabulary are handled.
"""

import json
from collections.abc import Sequence
from functools import cache

import torch
from tiny_models import VOCAB, tiny_module
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider.runtime import HFModel

TEXTS = (
    "def add(x, y):\n    return x + y\n",
    "The quick brown fox jumps over the lazy dog, and doesn't look back.",
    "Le naïve café à côté, déjà vu; 東京から京都まで。",
    "for line in lines:\n    print(line)\n",
)
KINDS = ("byte", "byte-small", "unigram", "fallback", "wordpiece")


@cache
def tokenizer(kind: str) -> PreTrainedTokenizerBase:
    """One of ``KINDS``; the same object each time."""
    return {
        "byte": lambda: _byte_level(340),
        "byte-small": lambda: _byte_level(290),
        "unigram": _unigram,
        "fallback": _fallback,
        "wordpiece": _wordpiece,
    }[kind]()


def model(kind: str, seed: int = 0, extra: int = 0, **settings: object) -> HFModel:
    """A random model in float64 with that tokenizer; its logits are ``extra`` entries wider."""
    words = tokenizer(kind)
    module = tiny_module("llama", seed, torch.float64, vocab_size=len(words) + extra, **settings)
    return HFModel(module, words, f"{kind} {seed}")


def words(vocabulary: Sequence[str]) -> PreTrainedTokenizerBase:
    """One token per word, the ids in this order; ``<unk>`` must be among them."""
    ids = {word: number for number, word in enumerate(vocabulary)}
    made = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    made.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(tokenizer_object=made, unk_token="<unk>")


def worded(seed: int = 0, **settings: object) -> HFModel:
    """A random model in float64 of the usual size, for methods that need a tokenizer."""
    module = tiny_module("llama", seed, torch.float64, **settings)
    return HFModel(module, words([*(f"w{i}" for i in range(VOCAB - 1)), "<unk>"]))


def _byte_level(size: int) -> PreTrainedTokenizerBase:
    """GPT-2's kind: bytes as letters, spaces in front of words."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        special_tokens=["<|endoftext|>", "<|im_start|>"],
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 4, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=made, eos_token="<|endoftext|>")


def _unigram() -> PreTrainedTokenizerBase:
    """SentencePiece's kind: ▁ for spaces, one before the text, a token that begins it."""
    made = Tokenizer(models.Unigram())
    made.pre_tokenizer = pre_tokenizers.Metaspace()
    made.decoder = decoders.Metaspace()
    trainer = trainers.UnigramTrainer(
        vocab_size=130,
        special_tokens=["<s>", "</s>", "<unk>"],
        unk_token="<unk>",
        show_progress=False,
    )
    made.train_from_iterator(TEXTS * 4, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _fallback() -> PreTrainedTokenizerBase:
    """Llama 2's kind: ▁ put in by a normaliser, unknown letters as bytes <0x..>."""
    special = ["<unk>", "<s>", "</s>", "<|im_start|>", *(f"<0x{byte:02X}>" for byte in range(256))]
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.Metaspace()
    trained.train_from_iterator(
        [text for text in TEXTS if text.isascii()] * 4,
        trainers.BpeTrainer(vocab_size=110, show_progress=False),
    )
    learnt = sorted(trained.get_vocab(), key=trained.get_vocab().__getitem__)
    ids = {form: number for number, form in enumerate([*special, *learnt])}
    merges = [tuple(pair) for pair in json.loads(trained.to_str())["model"]["merges"]]
    made = Tokenizer(models.BPE(ids, merges, unk_token="<unk>", byte_fallback=True))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", 1, 0),
        ]
    )
    made.add_special_tokens([AddedToken(name, special=True) for name in special[:4]])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", ids["<s>"])]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, bos_token="<s>", eos_token="</s>", unk_token="<unk>"
    )


def _wordpiece() -> PreTrainedTokenizerBase:
    """BERT's kind: lower case, no spaces, ## for the rest of a word, brackets round the text."""
    made = Tokenizer(models.WordPiece(unk_token="[UNK]"))
    made.normalizer = normalizers.BertNormalizer()
    made.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    made.decoder = decoders.WordPiece()
    names = ["[UNK]", "[CLS]", "[SEP]"]
    trainer = trainers.WordPieceTrainer(vocab_size=150, special_tokens=names, show_progress=False)
    made.train_from_iterator(TEXTS * 4, trainer)
    made.post_processor = processors.TemplateProcessing(
        single="[CLS] $A [SEP]",
        special_tokens=[(name, made.token_to_id(name)) for name in names[1:]],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=made, unk_token="[UNK]", cls_token="[CLS]", sep_token="[SEP]"
    )

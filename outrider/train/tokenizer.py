"""A byte-level BPE tokenizer for source code, saved as an ordinary Hugging Face folder.

Byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) decodes any UTF-8 text exactly.  The
pre-tokenizer is made for code: a run of newlines, an indentation and a word are separate pieces, so
no token contains both a line break and the indentation after it.  A prompt may end in either and is
tokenised as in the training text.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"  # separates documents, begins and ends every text; id 0
PADDING = "<|pad|>"
PIECES = r"\n+| {2,}|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 6144) -> PreTrainedTokenizerFast:
    """Train a tokenizer with at most `vocab_size` entries on `texts`."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_train_bpe(texts, vocab_size, [END_OF_TEXT]),
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )


def train_pair_tokenizer(texts: Iterable[str], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a tokenizer for an encoder-decoder: id 0 pads and begins a text, id 1 ends it."""
    from transformers import PreTrainedTokenizerFast

    return PreTrainedTokenizerFast(
        tokenizer_object=_train_bpe(texts, vocab_size, [PADDING, END_OF_TEXT]),
        pad_token=PADDING,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
    )


def _train_bpe(texts: Iterable[str], vocab_size: int, special_tokens: list[str]) -> Tokenizer:
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

    if vocab_size < 256 + len(special_tokens):
        raise ValueError(
            f"vocab_size is {vocab_size}; a byte-level vocabulary needs at least "
            f"{256 + len(special_tokens)}"
        )
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=special_tokens,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return bpe

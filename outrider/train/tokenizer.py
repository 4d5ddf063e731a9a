"""A byte-level BPE tokenizer for source code, saved as an ordinary Hugging Face folder.

Byte-level BPE (Sennrich et al. 2016; bytes as in GPT-2) loses nothing: any UTF-8 text comes back
exactly.  The pre-tokenizer is made for code: a run of newlines, an indentation and a word are each
one piece, so no token spans a line break and its indentation, and a prompt that ends in either
continues as the training text would.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerFast

END_OF_TEXT = "<|endoftext|>"  # separates documents; begins and ends every text; id 0
PIECES = r"\n+| {2,}|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+|\s"


def train_tokenizer(texts: Iterable[str], vocab_size: int = 6144) -> PreTrainedTokenizerFast:
    """Train the tokenizer on `texts`; the result has exactly `vocab_size` entries at most."""
    from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
    from transformers import PreTrainedTokenizerFast

    if vocab_size < 257:
        raise ValueError(f"vocab_size is {vocab_size}; a byte-level vocabulary needs at least 257")
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
        special_tokens=[END_OF_TEXT],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        bos_token=END_OF_TEXT,
        eos_token=END_OF_TEXT,
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )

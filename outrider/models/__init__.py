"""``transformers`` as the model zoo: loading, slab caches, masks."""

from outrider.models.cache import SlabCache
from outrider.models.hf import HFModel
from outrider.models.load import check_vocabularies, load_model, load_tokenizer
from outrider.models.masks import Nodes
from outrider.models.seq2seq import Seq2SeqModel, check_kinds

__all__ = [
    "HFModel",
    "Nodes",
    "Seq2SeqModel",
    "SlabCache",
    "check_kinds",
    "check_vocabularies",
    "load_model",
    "load_tokenizer",
]

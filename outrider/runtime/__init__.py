"""Runs ``transformers`` models: loading, KV caches, forward passes and their executors."""

from outrider.runtime.attention_metadata import Nodes
from outrider.runtime.hf.adapter import HFModel
from outrider.runtime.hf.load import check_vocabularies, load_model, load_tokenizer
from outrider.runtime.hf.recurrent import RecurrentModel, check_chains
from outrider.runtime.hf.seq2seq import Seq2SeqModel, check_kinds
from outrider.runtime.kv_cache.cache import KVCache
from outrider.runtime.kv_cache.recurrent import RecurrentCache

__all__ = [
    "HFModel",
    "KVCache",
    "Nodes",
    "RecurrentCache",
    "RecurrentModel",
    "Seq2SeqModel",
    "check_chains",
    "check_kinds",
    "check_vocabularies",
    "load_model",
    "load_tokenizer",
]

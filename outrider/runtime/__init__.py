"""Runs ``transformers`` models: loading, KV caches, forward passes and their executors.

Names are imported when they are first used: the kernels are compiled without ``transformers``.
"""

from typing import TYPE_CHECKING

from outrider.imports.lazy import lazy

if TYPE_CHECKING:
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

_HOME = {
    "HFModel": "outrider.runtime.hf.adapter",
    "KVCache": "outrider.runtime.kv_cache.cache",
    "Nodes": "outrider.runtime.attention_metadata",
    "RecurrentCache": "outrider.runtime.kv_cache.recurrent",
    "RecurrentModel": "outrider.runtime.hf.recurrent",
    "Seq2SeqModel": "outrider.runtime.hf.seq2seq",
    "check_chains": "outrider.runtime.hf.recurrent",
    "check_kinds": "outrider.runtime.hf.seq2seq",
    "check_vocabularies": "outrider.runtime.hf.load",
    "load_model": "outrider.runtime.hf.load",
    "load_tokenizer": "outrider.runtime.hf.load",
}

__getattr__, __dir__ = lazy(__name__, _HOME)

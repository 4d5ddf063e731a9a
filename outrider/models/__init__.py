"""``transformers`` as the model zoo: loading, slab caches, masks."""

from outrider.models.cache import SlabCache
from outrider.models.hf import HFModel
from outrider.models.load import check_vocabularies, load_model, load_tokenizer
from outrider.models.masks import Nodes

__all__ = ["HFModel", "Nodes", "SlabCache", "check_vocabularies", "load_model", "load_tokenizer"]

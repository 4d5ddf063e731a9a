"""Which tokens end a sequence."""

from outrider.runtime.hf.adapter import HFModel


def eos_ids(model: HFModel) -> frozenset[int]:
    """The end-of-sequence tokens of a model's generation settings, else of its tokenizer."""
    config = getattr(model.module, "generation_config", None) or model.module.config
    ids = getattr(config, "eos_token_id", None)
    if ids is None and model.tokenizer is not None:
        ids = model.tokenizer.eos_token_id
    return frozenset([] if ids is None else [ids] if isinstance(ids, int) else ids)

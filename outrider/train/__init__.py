"""Training of target and draft models: corpus, tokenizer, losses, resumable loop, evaluation."""

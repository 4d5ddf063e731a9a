"""Training of targets and drafts: corpus, tokenizer, losses, the resumable loop, evaluation."""

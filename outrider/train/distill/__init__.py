"""Distillation of a draft model from a frozen target: prompts, answers, targets, training, card."""

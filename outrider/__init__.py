"""Speculative decoding for PyTorch and Hugging Face transformers."""

__version__ = "0.1.0"

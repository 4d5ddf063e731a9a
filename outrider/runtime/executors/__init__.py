"""Executors: eager and compiled forward passes, CUDA graphs, fused drafts, fused verification."""

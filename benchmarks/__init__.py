"""Benchmarks: each is one command, and writes its results to ``benchmarks/results``."""

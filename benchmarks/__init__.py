"""Side-by-side measurements, each one command, with results under ``benchmarks/results``."""

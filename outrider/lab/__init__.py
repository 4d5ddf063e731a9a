"""The laboratory: benchmarks, reports, analyses, certificates, frontiers and profiles of the user's
own models and settings."""

"""Adapters of ``transformers`` models, loading, checks; no other package uses the modelling API."""

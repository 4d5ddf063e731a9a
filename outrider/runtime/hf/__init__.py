"""The only package that touches the modelling API of ``transformers``: adapters, loading,
checks."""

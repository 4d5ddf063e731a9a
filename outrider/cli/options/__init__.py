"""Options that several commands share, each stated once.

A class of them can be the type of a command's parameter; ``group.expanded`` makes its fields
options. Defaults that belong to one command are written there; a test holds those of ``generate``
equal to those of ``Sampling`` and ``load``.
"""

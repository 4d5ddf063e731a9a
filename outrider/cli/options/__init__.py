"""Options that several commands share, each defined once.

A command may take a dataclass of options as a parameter; ``group.expanded`` turns its fields into
options. A default that is particular to a command is set in that command. A test checks that the
defaults of ``generate`` are those of ``Sampling`` and ``load``.
"""

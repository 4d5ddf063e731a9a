"""Quick imports: those of ``torch`` and ``transformers`` take most of the time from the start of a
command to its first token.

    lazy               names of a package are imported when they are first used
    garbage            no garbage is collected during imports
    import_structure   which names there are in ``transformers`` is stored
    deferred           imports that ``transformers`` makes for others wait
    finder             has the modules of the last two run by functions of ours
"""

from outrider.imports import deferred, finder, import_structure


def quicken_imports() -> None:
    """Has ``transformers``, if it is imported from now on, imported in less time."""
    finder.install(deferred.runs() | import_structure.runs())

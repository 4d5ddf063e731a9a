"""Prompts for measurements, from the user's files, published data sets and the hub.

example   a prompt with its reference answer; a data set of them, pinned by a hash
layouts   the layouts of published data sets, recognised by their fields
files     records of JSON lines, CSV, Parquet and text files
hub       records of data sets on the Hugging Face hub
read      from a source to a data set
prompts   chat template or text
"""

from outrider.lab.data.example import DataSet, Example, Turn
from outrider.lab.data.prompts import PROMPTS, Prompts, as_prompts, with_forced_references
from outrider.lab.data.read import builtin_names, chosen, read_data

__all__ = [
    "PROMPTS",
    "DataSet",
    "Example",
    "Prompts",
    "Turn",
    "as_prompts",
    "builtin_names",
    "chosen",
    "read_data",
    "with_forced_references",
]

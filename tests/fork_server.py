"""A fork server for tests, which has imported what the processes forked from it import.

Python 3.11 imports the modules that are named to a fork server without the paths of the process
that starts it, and leaves out those that it does not find: the modules of the tests, and with them
torch and transformers, which each process would take seconds to import.
"""

import multiprocessing
import os
import sys
from multiprocessing import forkserver
from multiprocessing.context import ForkServerContext
from unittest.mock import patch

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM

import outrider.cluster.sharded.entry
import outrider.engine.loading
import outrider.train.distill.run
import outrider.train.heads.run

__all__ = ["AutoModelForCausalLM", "AutoTokenizer", "LlamaForCausalLM", "outrider"]  # preloaded

torch.set_num_threads(1)


def fork_server(*modules: str) -> ForkServerContext:
    """A context whose processes are forked from a server that has imported this module and the
    named ones. There is one server per test process: it imports what the first call names."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__, *modules])
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(filter(None, sys.path))):
        forkserver.ensure_running()
    return context

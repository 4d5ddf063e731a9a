"""More than one process, and more than one machine.

sharded/     one target on several processes, by `torchrun`
batch/       files of prompts: `outrider batch`
replicas/    a server with several engines, on Ray Serve: `outrider serve --replicas`
    connection.py    the Ray cluster that a command runs on
"""

"""More than one process, and more than one machine.

batch/       files of prompts: `outrider batch`
replicas/    a server with several engines, on Ray Serve: `outrider serve --replicas`
    connection.py    the Ray cluster that a command runs on
"""

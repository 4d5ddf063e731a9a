"""More than one process, and more than one machine.

batch/       files of prompts: `outrider batch`
"""

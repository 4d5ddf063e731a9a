"""Tool calls: functions that a model may ask the client to call.

fields.py      what requests say of tools
formats.py     how models write calls, by their chat templates
grammar.py     the grammar of an answer that must, or may, be calls
json_call.py   reads one call, a JSON object, as its text arrives
reply.py       splits an answer into its text and its calls, as it arrives
"""

"""Which node has how much of a prompt, kept from the nodes' cache events.

In: one event feed per node, the keys of prompts that are placed. Out: ``Coverage`` by node for a prompt's keys. Must
not know: placement, and what becomes of its answer. An entry is a guess: a wrong one costs time, never an answer.
"""

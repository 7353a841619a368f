"""Answers of chats taken apart: reasoning, content and tool calls.

In come a chat template (as a function that renders) and, per answer, token ids; out go the format that the template
writes (``detection``), deltas that depend on the token sequence alone (``stream``), and grammars that hold an answer
to the format (``grammar``). No model, no HTTP, no torch: a proxy and a node come to the same result.
"""

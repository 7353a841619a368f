"""The OpenAI API as data: request bodies read and checked, response objects and errors built.

In come JSON objects; out go frozen requests (``protocol``), sampling parameters for an engine, and the dictionaries
and event lines that clients read. Only ``errors`` knows a web framework. Nothing here tokenises, renders a template,
computes, or holds state.
"""

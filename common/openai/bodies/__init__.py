"""Request bodies as pydantic models: one schema for parsing, errors, ``/openapi.json`` and the tables of docs/api.md.

``models`` declares every field that acts, ``values`` the fields that are more than a number or a word, ``unsupported``
those that others define and that are refused by name; ``base`` turns what pydantic says into our errors. In comes
JSON that was parsed; out go bodies whose values are good by themselves: nothing here knows a model or a tokenizer.
"""

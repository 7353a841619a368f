"""From a step's rows to the sequences' next tokens.

In come sequences with the rows that the forward has left of them; out go tokens, appended and reported, and ends. Whose
grammar is not there yet is held. What sampling itself is, is in ``common.engine.sampling``.
"""

"""From a model's ``config.json`` to what its layers keep between tokens.

A raw config comes in, a ``ModelGeometry`` or an error that names what is not supported goes out. One function per
family; must not know torch or transformers, so that planner and simulator run without them.
"""

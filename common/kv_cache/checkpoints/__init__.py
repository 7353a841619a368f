"""States kept at exact positions: what a checkpoint is, and which positions are worth one.

A prompt's length, its resume and its meaningful positions come in; positions with the reason why go out. Knows no
memory: slots and blocks are found by ``sequences``.
"""

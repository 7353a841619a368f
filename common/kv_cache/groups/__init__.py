"""One manager per KV cache group: which published block, or checkpoint, holds which prefix.

Key chains come in, blocks and checkpoints go out; each kind of group has its own way of looking up. What concerns
several groups at once is the coordinator's.
"""

"""What running sequences hold, and the moves on it: growth, saves on the way, the end of a prompt, leaving.

The manager calls with a sequence's id; allocations, published blocks and checkpoints result. Must not know readers on
other nodes: ``sharing`` does.
"""

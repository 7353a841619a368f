"""How long the engine's next step will take, and how many prompt tokens fit into it.

In: measured steps. Out: predictions, and the size of a prompt's chunk beside rows that generate. No torch, no clock of
its own. Must not know: sequences, memory, models.
"""

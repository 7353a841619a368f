"""Which cached unit goes first when memory is short.

The pools ask an order for victims; policies hear of admissions, publications and removals. ``create`` chooses by the
configuration's name. Evicts nothing itself and must not know pools or sequences.
"""

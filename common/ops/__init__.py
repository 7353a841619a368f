"""Ops: what a hybrid model computes over the packed rows of one step, on pools of blocks and state slots.

In come rows, a step's attention metadata (``step``) and the pool views of one layer; out go the rows' results, with
K/V and states written to their places. ``interface.py`` is the contract, ``torch`` the reference on any device,
``cpu`` the compiled backend, ``select.py`` the choice between them. Imports torch and the standard library only;
nothing here knows models, requests or how memory is given out.
"""

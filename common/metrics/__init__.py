"""Prometheus metrics of one process.

In come counts, observations and a function to ask for current numbers; out goes the exposition text. ``table`` names
every metric of every process, ``labels`` says what their label values mean; the documentation is written from both.
Nothing here knows what is measured.
"""

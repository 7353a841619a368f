"""How many requests a second two nodes serve within their targets: ``python -m benchmarks.goodput``.

``traffic`` says what comes when, ``clients`` sends it and notes the times, ``services`` starts two nodes in each of
three ways, ``search`` looks for the highest rate at which enough requests keep their targets.
"""

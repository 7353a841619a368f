"""What our own processes say to each other: routes, headers and JSON bodies, each defined once for both sides.

In come values that one side wants to say and JSON that the other received; out go JSON and checked values. ``fields``
reads JSON strictly, for every body of the service. Nothing here sends anything, or knows blocks, nodes or requests
beyond their numbers.
"""

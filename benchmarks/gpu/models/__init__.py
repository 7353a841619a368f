"""The models that are measured: of published sizes with random weights, and the tests' tiny ones for answers."""

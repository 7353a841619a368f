"""The ops in plain torch: right on every device, and what the compiled ones are held against.

``backend.py`` implements the interface with the functions of the other files, one file per kind of op. They take
tensors, one step's metadata and a pool, and keep nothing between calls.
"""

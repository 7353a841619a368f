"""The GPU backend on a real GPU: ``bash benchmarks/gpu.sh``.

``__main__`` runs *parts* one after the other, each in a process and under a time limit of its own (``jobs.py``), and
writes what they found after each of them. A part is a module of ``parts``; ``job.py`` is the process in which it runs.
"""

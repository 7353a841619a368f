"""What each process is told at its start, by flags or environment variables.

In come command lines, the environment and key files; out go frozen, checked dataclasses (``NodeConfig``,
``ProxyConfig``) and the command lines that give them again. A ``Flag`` is described once, by its field. Nothing here
acts on what it reads.
"""

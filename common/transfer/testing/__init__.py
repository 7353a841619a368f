"""Transports for tests: copies within one process, and any transport with faults that a test asks for.

They keep the same contract as a real one (``common.transfer.backend``), and one suite tests them all. A node uses the
fault injector only when it was started with test hooks; nothing else of the product imports this folder.
"""

"""The parts of a step's plan that can be decided by themselves, one question each.

In come sequences, what the cache manager has for them, and how long steps take; out go what the scheduler puts into its
``Schedule``. The queues, and who gets memory or loses it, are the scheduler's. No torch.
"""

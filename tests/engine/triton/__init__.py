"""Triton's kernels against the torch ops: in its interpreter, or compiled where there is a GPU."""

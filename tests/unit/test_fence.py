"""That a fence is made of what its docstring says. That the processor keeps the order cannot be shown on x86, which
never gives it up."""

from __future__ import annotations

from common.fence import Fence


class RecordingLock:
    def __init__(self) -> None:
        self.calls: list[str] = []

    def acquire(self) -> None:
        self.calls.append("acquire")

    def release(self) -> None:
        self.calls.append("release")


def test_fence_when_called_then_a_release_stands_between_two_acquires() -> None:
    """One pair alone would let what came before and what follows meet between acquire and release."""
    fence, lock = Fence(), RecordingLock()
    fence._lock = lock  # type: ignore[assignment]
    fence()
    assert lock.calls == ["acquire", "release", "acquire", "release"]
    Fence()()

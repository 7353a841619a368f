"""The only strong reference to a thing whose end must be known: a transport's agent, which writes memory until it is
gone.

Life: 1 made around the thing, 2 ``value`` for a call at a time, never kept in a name: a frame keeps its names for as
long as somebody keeps an error that passed through it, 3 ``drop``, which says whether the thing has ended. Until it
has, the reference is there again, and with it everything that the thing can do.
"""

from __future__ import annotations

import gc
import sys
import weakref
from types import FrameType
from typing import Generic, TypeVar

T = TypeVar("T")

_OWN_REFERENCES = 2
"""What ``sys.getrefcount`` counts of a thing that only we hold: our attribute, and its own argument."""


class SoleReference(Generic[T]):
    """Used by one thread at a time."""

    def __init__(self, value: T) -> None:
        self._value: T | None = value
        self._has_ended = False
        # A callback, and not the dead reference, is the proof: NIXL's agent calls it once its destructor has returned.
        self._watch = weakref.ref(value, self._note_end)

    def _note_end(self, _: weakref.ref[T]) -> None:
        self._has_ended = True

    @property
    def value(self) -> T:
        assert self._value is not None, "dropped"
        return self._value

    def is_shared(self) -> bool:
        """Whether somebody else holds it too, also after a full collection of garbage (a second on a large heap, made
        only when there is such a somebody)."""
        if self._value is None:
            return not self._has_ended
        if sys.getrefcount(self._value) > _OWN_REFERENCES:
            gc.collect()
        return sys.getrefcount(self._value) > _OWN_REFERENCES

    def holders(self) -> list[str]:
        """What else the collector knows to hold it, for a log: kinds, and the function of a frame."""
        ours = {id(self), id(self.__dict__)}
        return [_kind(each) for each in gc.get_referrers(self._value) if id(each) not in ours]

    def drop(self) -> bool:
        """Gives the reference up. True: the thing has ended, and everything that ends with it. False: somebody holds
        it, and so does this again."""
        self._value = None
        if not self._has_ended:
            self._value = self._watch()
        return self._has_ended


def _kind(holder: object) -> str:
    return f"frame of {holder.f_code.co_qualname}" if isinstance(holder, FrameType) else type(holder).__name__

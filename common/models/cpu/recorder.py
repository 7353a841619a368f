"""Records what a forward does to memory, as a program that does it again without the model's Python code.

A forward over decode rows alone calls the same kernels on the same shapes every time; what differs is in a few input
tensors, in the pools and in the step's own words. So it is recorded once: torch operations through a dispatch mode,
compiled kernels as a ``KernelRecorder``. 1 every result that depends on an input is moved to a fixed place in an
arena, views are made once and forgotten, 2 what depends on weights alone is computed once and kept, 3 the rest becomes
the program: runs of compiled calls, and torch operations that write to the same places as before.

What cannot be repeated (a value that Python code asked for, a shape that depends on values, a random number, writes
outside the arena) makes the recording fail; the forward itself is right in any case.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map

from common.models.cpu.arena import Arena, Place
from common.models.cpu.program import Program
from common.ops.cpu.backend import CppOps
from common.ops.cpu.elementwise import Elementwise
from common.ops.cpu.launch import recording_kernels
from common.ops.step.packed import PackedStep

# Operations whose result is memory without values.
_FRESH = frozenset(
    {"aten::empty", "aten::new_empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty_strided"}
)
# Tags of operations whose result's shape or whose way through Python depends on values.
_NEVER = (torch.Tag.dynamic_output_shape, torch.Tag.data_dependent_output)
# Methods that hand values to Python without an operation that a dispatch mode sees.
_EXITS = (Tensor.tolist, Tensor.numpy, Tensor.__array__)
# Operations that the compiled element by element kernel computes with torch's own bits.
_BINARY = {"aten::add": Elementwise.ADD, "aten::sub": Elementwise.SUB, "aten::mul": Elementwise.MUL}
_COPIES = frozenset({"aten::_to_copy", "aten::clone"})


@dataclass(frozen=True, slots=True)
class _KernelCall:
    function: Any
    words: array[int]
    group: int  # attention group whose step it reads; -1: none


@dataclass(frozen=True, slots=True)
class _TorchCall:
    function: Callable[..., Any]
    args: Any
    kwargs: Any
    results: tuple[Place, ...] | None  # None: it writes to one of its arguments


class Recorder(TorchDispatchMode):
    """Records one forward: ``with recorder.recording(): output = forward(*recorder.inputs)``, then :meth:`finish`."""

    def __init__(
        self,
        ops: CppOps,
        arena: Arena,
        inputs: Sequence[Tensor],
        pools: Sequence[Tensor],
        steps: Sequence[PackedStep],
        constants: dict[Any, Any],
    ) -> None:
        """``pools``: memory outside of the arena that changes from step to step. ``steps``: the step of each attention
        group. ``constants``: results that earlier recordings of the model computed from its weights; added to."""
        super().__init__()
        self._ops, self._arena = ops, arena
        self._step_addresses = [step.address for step in steps]
        self._steps = [array("q", step.header) for step in steps]
        self._pools = {pool.untyped_storage().data_ptr() for pool in pools}
        self._constants = constants
        self._occurrences: Counter[Any] = Counter()
        self._calls: list[_KernelCall | _TorchCall] = []
        self._kept: list[Any] = []
        self._basic: set[Any] = set()  # operations that are made of no others
        self.reason = ""
        """Why the forward cannot be replayed; empty: it can."""
        self.inputs = tuple(self._moved(x) for x in inputs)

    def refuse(self, reason: str) -> None:
        self.reason = self.reason or reason

    def add_kernel(self, function: Any, words: array[int], step_address: int, kept: tuple[Any, ...]) -> None:
        if step_address and step_address not in self._step_addresses:
            self.refuse("a kernel read another step")
            return
        group = self._step_addresses.index(step_address) if step_address else -1
        self._calls.append(_KernelCall(function, words, group))
        self._kept.extend(x for x in kept if not (isinstance(x, Tensor) and self._arena.holds(x)))

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.reason:
            return func(*args, **kwargs)
        if func not in self._basic:
            with self:  # a composite operation is recorded as what it is made of
                result = func.decompose(*args, **kwargs)
            if result is not NotImplemented:
                return result
            self._basic.add(func)
        if torch.Tag.nondeterministic_seeded in func.tags:
            self.refuse(f"{func} draws random numbers")
            return func(*args, **kwargs)
        name = func._schema.name
        tensors = _tensors((args, kwargs))
        is_varying = any(self._varies(x) for x in tensors)
        if name in _FRESH:
            return self._moved(func(*args, **kwargs), copied=False)
        if any(a.alias_info is not None and a.alias_info.is_write for a in func._schema.arguments):
            return self._write(func, args, kwargs)
        is_view = any(r.alias_info is not None for r in func._schema.returns)
        if tensors and not is_varying and not is_view and not any(tag in func.tags for tag in _NEVER):
            return self._constant(func, args, kwargs)
        result = func(*args, **kwargs)
        results = _tensors(result)
        if not is_varying:
            self._kept.extend(results)
        if is_view or not is_varying:
            return result
        if any(tag in func.tags for tag in _NEVER) or len(results) != len(list(_leaves(result))):
            self.refuse(f"{func} depends on values")
            return result
        moved = tree_map(lambda x: self._moved(x) if isinstance(x, Tensor) else x, result)
        self._record(func, args, kwargs, _tensors(moved))
        return moved

    def _constant(self, func: Any, args: Any, kwargs: Any) -> Any:
        """The result of an operation that depends on weights alone, computed once per model. Equal calls in one forward
        have a result each, because one of the results may be written to."""
        leaves = [
            (x.data_ptr(), x.shape, x.stride(), x.dtype) if isinstance(x, Tensor) else (type(x), x)
            for x in _leaves((args, kwargs))
        ]
        key = (func, *leaves)
        self._occurrences[key] += 1
        key = (self._occurrences[key], *key)
        if key not in self._constants:
            self._constants[key] = func(*args, **kwargs)
        result = self._constants[key]
        self._kept.append(result)
        return result

    def finish(self, output: Tensor) -> Program | None:
        """The program, or None if the forward cannot be repeated; ``output``: the part of its result that is wanted."""
        if not self._arena.holds(output):
            self.refuse("the output does not depend on the inputs")
        if self.reason:
            return None
        steps = self._steps
        stages: list[Callable[[], None]] = []
        pending: list[int] = []
        for call in self._calls:
            if isinstance(call, _KernelCall):
                address = ctypes.cast(call.function, ctypes.c_void_p).value
                assert address is not None
                step = steps[call.group].buffer_info()[0] if call.group >= 0 else 0
                pending += [address, call.words.buffer_info()[0], step]
                self._kept.append(call.words)
            else:
                self._flush(stages, pending)
                stages.append(self._torch_stage(call))
        self._flush(stages, pending)
        inputs = tuple(self._arena.view(Place.of(x)) for x in self.inputs)
        return Program(self._ops, inputs, self._arena.view(Place.of(output)), stages, steps, self._kept)

    def _flush(self, stages: list[Callable[[], None]], pending: list[int]) -> None:
        if pending:
            calls, count, replay = array("q", pending), len(pending) // 3, self._ops.elementwise.replay
            stages.append(lambda: replay(calls, count))
            pending.clear()

    def _torch_stage(self, call: _TorchCall) -> Callable[[], None]:
        view = self._arena.view
        args, kwargs = tree_map(lambda x: view(x) if isinstance(x, Place) else x, (call.args, call.kwargs))
        function = call.function
        if call.results is None:
            return lambda: function(*args, **kwargs)
        results = [view(place) for place in call.results]
        variant = _out_variant(function)
        if variant is not None and len(results) == 1:
            out = results[0]
            return lambda: variant(*args, **kwargs, out=out)

        def stage() -> None:
            for to, x in zip(results, _tensors(function(*args, **kwargs)), strict=True):
                to.copy_(x)

        return stage

    def _varies(self, x: Tensor) -> bool:
        return self._arena.holds(x) or x.untyped_storage().data_ptr() in self._pools

    def _moved(self, x: Tensor, copied: bool = True) -> Tensor:
        place = self._arena.empty(x.shape, x.stride(), x.dtype)
        if place is None:
            self.refuse("the arena is full")
            return x
        return place.copy_(x) if copied else place

    def _write(self, func: Any, args: Any, kwargs: Any) -> Any:
        writes = [i for i, a in enumerate(func._schema.arguments) if a.alias_info is not None and a.alias_info.is_write]
        if writes != [0] or not self._arena.holds(args[0]):
            self.refuse(f"{func} writes to memory that is not the step's own")
            self._constants.clear()  # what was written to may be one of them
            return func(*args, **kwargs)
        result = func(*args, **kwargs)
        name = func._schema.name
        if name == "aten::copy_":
            self._record(func, args, kwargs, None, native=(Elementwise.COPY, args[0], args[1], 0.0))
        elif name.rstrip("_") in _BINARY and kwargs.get("alpha", 1) == 1 and len(args) == 2:
            self._record(func, args, kwargs, None, native=(_BINARY[name.rstrip("_")], args[0], args[0], args[1]))
        else:
            self._record(func, args, kwargs, None)
        return result

    def _record(
        self, func: Any, args: Any, kwargs: Any, results: list[Tensor] | None, native: tuple[Any, ...] | None = None
    ) -> None:
        """``results`` None: the operation writes to its first argument, and ``native`` says how the kernel does it."""
        name = func._schema.name
        if results is not None and len(results) == 1:
            out = results[0]
            if name in _BINARY and kwargs.get("alpha", 1) == 1 and len(args) == 2 and isinstance(args[0], Tensor):
                native = (_BINARY[name], out, args[0], args[1])
            elif name in _COPIES:
                native = (Elementwise.COPY, out, args[0], 0.0)
            elif name == "aten::neg":
                native = (Elementwise.NEG, out, args[0], 0.0)
            elif name == "aten::cat":
                self._record_cat(func, args, kwargs, out)
                return
        call = self._ops.elementwise.words(*native) if native is not None and _is_number_or_tensor(native[3]) else None
        if call is not None:
            words, kept = call
            self._kept.extend(kept)
            self._keep_constants(args, kwargs)
            self._calls.append(_KernelCall(self._ops.elementwise.function, array("q", words), -1))
            return
        placed = tree_map(self._placed, (args, kwargs))
        places = None if results is None else tuple(Place.of(x) for x in results)
        self._calls.append(_TorchCall(func, placed[0], placed[1], places))

    def _record_cat(self, func: Any, args: Any, kwargs: Any, out: Tensor) -> None:
        parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
        calls: list[tuple[list[int], tuple[Any, ...]] | None] = []
        begin = 0
        for part in parts:
            if part.ndim != out.ndim or part.shape[dim] == 0:  # also of one dimension and empty: torch passes it over
                calls.append(None)
                break
            size = part.shape[dim]
            calls.append(self._ops.elementwise.words(Elementwise.COPY, out.narrow(dim, begin, size), part))
            begin += size
        if None in calls:
            placed = tree_map(self._placed, (args, kwargs))
            self._calls.append(_TorchCall(func, placed[0], placed[1], (Place.of(out),)))
            return
        self._keep_constants(args, kwargs)
        for words, kept in (call for call in calls if call is not None):
            self._kept.extend(kept)
            self._calls.append(_KernelCall(self._ops.elementwise.function, array("q", words), -1))

    def _keep_constants(self, *trees: Any) -> None:
        self._kept.extend(x for x in _tensors(trees) if not self._arena.holds(x))

    def _placed(self, x: Any) -> Any:
        return Place.of(x) if isinstance(x, Tensor) and self._arena.holds(x) else x

    @contextmanager
    def recording(self) -> Iterator[None]:
        """Where the forward runs."""
        with recording_kernels(self), _Exits(self), self:
            yield

    def read(self, x: Tensor) -> None:
        """Python code has got the values of ``x``."""
        if self._varies(x):
            self.refuse("Python code asked for values")


class _Exits(TorchFunctionMode):
    """Watches the ways on which values get into Python without an operation that a dispatch mode would see."""

    def __init__(self, recorder: Recorder) -> None:
        super().__init__()
        self._recorder = recorder

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _EXITS:
            self._recorder.read(args[0])
        return func(*args, **(kwargs or {}))


def _leaves(tree: Any) -> Iterator[Any]:
    """Of an operation's arguments or results: a fifth of the time of torch's own, which knows more kinds of trees."""
    if isinstance(tree, (list, tuple)):
        for each in tree:
            yield from _leaves(each)
    elif isinstance(tree, dict):
        yield from _leaves(list(tree.values()))
    else:
        yield tree


def _tensors(tree: Any) -> list[Tensor]:
    return [x for x in _leaves(tree) if isinstance(x, Tensor)]


def _is_number_or_tensor(x: Any) -> bool:
    return isinstance(x, (int, float, Tensor)) and not isinstance(x, bool)


def _out_variant(func: Any) -> Any | None:
    """The overload of the same operation that writes to ``out``, if it takes the same arguments."""
    packet, names = func._overloadpacket, [a.name for a in func._schema.arguments]
    for overload in (f"{func._overloadname}_out", "out"):
        if overload in packet.overloads():
            variant = getattr(packet, overload)
            if [a.name for a in variant._schema.arguments] == [*names, "out"]:
                return variant
    return None

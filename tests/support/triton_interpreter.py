"""Triton kernels on a machine without a GPU: in Triton's interpreter, which computes a program with numpy.

``TRITON_DEVICE`` is where tests of kernels put their tensors: ``cuda`` where there is a GPU, then kernels are compiled;
else ``cpu``. Import this module before any module with kernels. As it comes, the interpreter (3.7) multiplies the raw
bits of bfloat16 operands in ``tl.dot``, rounds float32 to bfloat16 towards zero, gives plain numbers out of
``range()``, and cannot autotune; all of that is mended here. Two things that took half of its time are done in less:
the look for overflows, and what puts the interpreter's functions in place of the compiler's at each call.
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import os
from typing import Any

import torch

TRITON_DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
if TRITON_DEVICE == "cpu":
    os.environ["TRITON_INTERPRET"] = "1"  # read when a kernel is decorated

import numpy as np  # noqa: E402
import triton.language as tl  # noqa: E402
from triton.language import semantic, standard  # noqa: E402
from triton.runtime import autotuner, interpreter  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402


def _widened(handle: Any) -> Any:
    """bfloat16 lives as its 16 bits; as float32 it can be multiplied."""
    if handle.dtype.scalar != tl.bfloat16:
        return handle
    return interpreter.TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)


def _rounding(stock: Any) -> Any:
    """float32 -> bfloat16 to the nearest, ties to even, as a GPU does."""

    def cast(self: Any, source: Any, to: Any, *args: Any) -> Any:
        if (source.dtype.scalar, to.scalar) != (tl.float32, tl.bfloat16):
            return stock(self, source, to, *args)
        bits = np.ascontiguousarray(source.data, np.float32).view(np.uint32)
        rounded = ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)
        return interpreter.TensorHandle(rounded, tl.bfloat16)

    return cast


class _TensorLoops(interpreter.ASTTransformer):
    """The variable of a ``for`` over ``range()`` is a tensor in compiled code."""

    def visit_For(self, node: Any) -> Any:  # noqa: N802  # the name that ast calls
        self.generic_visit(node)
        if isinstance(node.target, ast.Name) and "static_range" not in ast.dump(node.iter):
            name = node.target.id
            node.body[:0] = ast.parse(f"{name} = interpreter_semantic.to_tensor({name}, False)").body
        return node


_EXACT = {"add": np.add, "sub": np.subtract, "mul": np.multiply}


def _assert_no_overflow(self: Any, left: Any, right: Any, operation: Any) -> None:
    """As the stock one, which computes it in nine interpreted operations."""
    scalar = left.type.scalar
    if scalar.int_bitwidth < 64:
        exact = _EXACT[operation.__name__](left.handle.data.astype(np.int64), right.handle.data.astype(np.int64))
        low, high = scalar.get_int_min_value(), scalar.get_int_max_value()
        assert low <= exact.min(), f"overflow of {scalar} in {operation.__name__}"
        assert high >= exact.max(), f"overflow of {scalar} in {operation.__name__}"


class _Patched:
    """What the interpreter put in place stays there: nothing is compiled in this process."""

    def restore(self) -> None: ...


def _patched_once(stock: Any) -> Any:
    patched: set[str] = set()

    def patch(function: Any) -> _Patched:
        """For one function of a module the interpreter patches what the module's others see too."""
        if function.__module__ not in patched:
            stock(function)
            patched.add(function.__module__)
        return _Patched()

    return patch


def _mend() -> None:
    builder = interpreter.InterpreterBuilder
    dot = builder.create_dot
    builder.create_dot = lambda self, a, b, d, *rest: dot(self, _widened(a), _widened(b), d, *rest)
    builder.cast_impl, builder.create_fp_to_fp = _rounding(builder.cast_impl), _rounding(builder.create_fp_to_fp)
    stock = interpreter.interpreter_builder.options
    precisions = (*stock.allowed_dot_input_precisions, "bf16x3", "bf16x6")  # as compiled code knows
    interpreter.interpreter_builder.options = dataclasses.replace(stock, allowed_dot_input_precisions=precisions)
    interpreter.FunctionRewriter.ast_transformer = _TensorLoops()
    semantic.TritonSemantic.binary_op_sanitize_overflow_impl = _assert_no_overflow
    interpreter._patch_lang = _patched_once(interpreter._patch_lang)
    init = autotuner.Autotuner.__init__

    def first_configuration(self: Any, function: Any, names: Any, configs: Any, *args: Any, **kwargs: Any) -> None:
        init(self, function, names, configs[:1], *args, **kwargs)

    autotuner.Autotuner.__init__ = first_configuration


def _interpret_standard_functions() -> None:
    """Whoever imported triton before has its own functions (``tl.sum``) to be compiled."""
    compiled = {name for name, value in vars(tl).items() if isinstance(value, JITFunction)}
    fresh = importlib.reload(standard)
    for name in compiled & vars(fresh).keys():
        setattr(tl, name, getattr(fresh, name))


if TRITON_DEVICE == "cpu":
    _mend()
    _interpret_standard_functions()

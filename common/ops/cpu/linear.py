"""Packed weights and the linear layers that read them: float32 and bfloat16 on the CPU.

A weight is packed once, and then is the only copy: a few rows read it at memory bandwidth, many rows at the speed of
the best matrix product, and single rows of it come back as an embedding. A row's result has the same bits whatever
other rows are in the call. Where products run on tiles, bfloat16 weights take 12 bits each, without loss
(``src/compact.h``).
"""

from __future__ import annotations

import ctypes
import mmap
from array import array
from dataclasses import dataclass

import torch
from torch import Tensor

from common.ops.cpu.launch import DTYPES, find_kernel, launch, refuse_replay


@dataclass(frozen=True, slots=True)
class PackedWeight:
    """One matrix [out_features, in_features] or ``num_groups`` of them, in the order in which the kernel reads it.

    ``words``: int32, flat; their order depends on the machine's vector width, so they never leave the process. Kernels
    may read a few words before them, which are part of the same memory.
    ``books``: int32 [num_groups, words of a book], the code of each compact matrix; None: all of them are plain.
    ``nbytes``: bytes of ``words`` in use.
    """

    words: Tensor
    books: Tensor | None
    nbytes: int
    dtype: torch.dtype
    num_groups: int
    in_features: int
    out_features: int


class LinearOps:
    """The compiled linear kernels. Stateless; runs on the caller's thread and torch's number of threads."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._library = library  # keeps it loaded
        self._linear, self._pack, self._unpack = (find_kernel(library, name) for name in ("linear", "pack", "unpack"))
        self._forget = library.tandem_forget
        self._forget.argtypes, self._forget.restype = (ctypes.c_void_p, ctypes.c_int64), None
        self._packed_words = library.tandem_packed_words
        self._packed_words.argtypes, self._packed_words.restype = (ctypes.c_int64,) * 3, ctypes.c_int64
        self._lead_words = int(library.tandem_lead_words())
        self._book_words = int(library.tandem_book_words())
        self._used_bytes = library.tandem_used_bytes
        self._used_bytes.argtypes = (*(ctypes.c_void_p,) * 2, *(ctypes.c_int64,) * 3)
        self._used_bytes.restype = ctypes.c_int64

    def num_words(self, weight: Tensor) -> int:
        """32-bit words that ``weight`` [(groups,) out, in] takes at most when packed."""
        groups = weight.shape[0] if weight.ndim == 3 else 1
        return int(self._lead_words + groups * self._packed_words(DTYPES[weight.dtype], *reversed(weight.shape[-2:])))

    def pack(self, weight: Tensor, words: Tensor, *, is_compact: bool = False) -> PackedWeight:
        """Copy ``weight`` [(groups,) out, in] to ``words``, int32 [num_words(weight)]. ``is_compact``: in 12 bits where
        the machine has kernels for it and nothing is lost; the rest of ``words`` is not touched then."""
        if words.dtype != torch.int32 or words.numel() != self.num_words(weight) or not words.is_contiguous():
            raise RuntimeError(f"pack: {words.dtype} {tuple(words.shape)} does not fit {tuple(weight.shape)}")
        words, weight = words[self._lead_words :], weight.detach().contiguous()
        groups, (out_features, in_features) = (weight.shape[0] if weight.ndim == 3 else 1), weight.shape[-2:]
        books = torch.zeros(groups, self._book_words, dtype=torch.int32) if is_compact else None
        shape = [DTYPES[weight.dtype], in_features, out_features]
        addresses = [weight.data_ptr(), words.data_ptr(), _address(books)]
        launch(self._pack, [*addresses, *shape, groups, torch.get_num_threads()])
        nbytes = words.nbytes
        if books is not None:
            parts = zip(books, words.view(groups, -1), strict=True)
            nbytes = sum(self._used_bytes(book.data_ptr(), part.data_ptr(), *shape) for book, part in parts)
            books = books if nbytes < words.nbytes else None
        return PackedWeight(words, books, nbytes, weight.dtype, groups, in_features, out_features)

    def forget(self, weight: Tensor) -> None:
        """Give the memory of ``weight`` back: its values are undefined from now on. Freeing is not enough where the
        weights are views of a mapped file, which stays while one of them is in use."""
        if weight.is_contiguous():
            self._forget(weight.data_ptr(), weight.nbytes)

    def linear(self, x: Tensor, weight: PackedWeight, bias: Tensor | None = None) -> Tensor:
        """x [..., in] -> [..., out], as :func:`torch.nn.functional.linear`; the bias is added before rounding."""
        if weight.num_groups != 1:
            raise RuntimeError(f"linear: {weight.num_groups} matrices where one is needed")
        shape = x.shape
        rows = x if x.ndim == 2 else x.reshape(shape[:-1].numel(), shape[-1])
        out = self._multiply(rows, array("q", (0, rows.shape[0])), weight, bias)
        return out if x.ndim == 2 else out.view(*shape[:-1], weight.out_features)

    def grouped(self, x: Tensor, begin: list[int], weight: PackedWeight) -> Tensor:
        """Rows [begin[g], begin[g + 1]) of x [num_rows, in] times matrix g; only matrices with rows are read.

        Returns: [num_rows, out].
        """
        if len(begin) != weight.num_groups + 1 or begin[0] != 0 or begin[-1] != x.shape[0]:
            raise RuntimeError(f"grouped linear: {len(begin) - 1} groups for {weight.num_groups} matrices")
        refuse_replay("rows go to other experts in each step")
        return self._multiply(x, array("q", begin), weight, None)

    def rows(self, weight: PackedWeight, indices: Tensor) -> Tensor:
        """weight[indices], as :func:`torch.nn.functional.embedding`. indices: int64 of any shape -> [..., in]."""
        flat = indices.flatten().contiguous()
        if weight.num_groups != 1 or flat.dtype != torch.int64:
            raise RuntimeError(f"packed rows: {flat.dtype} indices into {weight.num_groups} matrices")
        # Read from the tensor's memory: asking torch for values would make a recording fail.
        ids = (ctypes.c_int64 * flat.numel()).from_address(flat.data_ptr()) if flat.numel() else ()
        if flat.numel() and not 0 <= min(ids) <= max(ids) < weight.out_features:
            raise IndexError(f"packed rows: an index is outside [0, {weight.out_features})")
        out = torch.empty(flat.numel(), weight.in_features, dtype=weight.dtype)
        numbers = [DTYPES[weight.dtype], weight.in_features, weight.out_features]
        addresses = [flat.data_ptr(), flat.numel(), out.data_ptr(), torch.get_num_threads()]
        launch(self._unpack, [weight.words.data_ptr(), _address(weight.books), *numbers, *addresses])
        return out.view(*indices.shape, weight.in_features)

    def _multiply(self, x: Tensor, begin: array[int], weight: PackedWeight, bias: Tensor | None) -> Tensor:
        num_rows, in_features = x.shape
        if x.dtype != weight.dtype or in_features != weight.in_features:
            raise RuntimeError(
                f"linear: {x.dtype} {tuple(x.shape)} rows, {weight.dtype} weight with {weight.in_features} inputs"
            )
        if x.stride(1) != 1:
            x = x.contiguous()
        out = x.new_empty(num_rows, weight.out_features)
        words = [
            *(x.data_ptr(), x.stride(0), out.data_ptr(), weight.out_features),
            *(weight.words.data_ptr(), _address(weight.books), DTYPES[x.dtype]),
            *((0, 0) if bias is None else (bias.data_ptr(), DTYPES[bias.dtype])),
            *(in_features, weight.out_features, weight.num_groups, begin.buffer_info()[0], torch.get_num_threads()),
        ]
        launch(self._linear, words, kept=(begin,))
        return out


def _address(tensor: Tensor | None) -> int:
    return 0 if tensor is None else tensor.data_ptr()


def large_pages(num_words: int) -> Tensor:
    """int32 [num_words] of zeros, in pages of 2 MB where the system has them: with small pages a processor spends as
    long on page tables as on the weights (read bandwidth 18 GB/s against 31, Zen 4 under KVM)."""
    # Private, because shared memory has no large pages unless the system is configured for it.
    memory = mmap.mmap(-1, max(4 * num_words, 1), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    if hasattr(mmap, "MADV_HUGEPAGE"):
        memory.madvise(mmap.MADV_HUGEPAGE)
    return torch.frombuffer(memory, dtype=torch.int32, count=num_words)

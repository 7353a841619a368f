"""What remote readers are shown: prefixes pinned until a deadline, and the finished blocks of running prompts.

A lease pins full blocks, tail blocks and the state. Every unit in it carries the tag of the content it stands for. One
block may hold the tails of several checkpoints, or be complete by now, and a unit has one tag only; such a tail is
leased as a copy of its own. What is shown of a running prompt is held by its
sequence alone: the reader's check of the generations says whether it was still there.
"""

from __future__ import annotations

from collections.abc import Callable
from itertools import islice
from typing import Any

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.keys import PrefixKeys
from common.kv_cache.pools.generations import content_tag
from common.kv_cache.prefix.hits import PrefixHit
from common.kv_cache.sequences.allocation import Allocation
from common.kv_cache.sequences.sequence_table import SequenceTable
from common.kv_cache.sharing.leases import Lease, LeasedClosure, LeasedPrefix, LeaseTable, PrefixProgress, Tables


class LeaseManager:
    def __init__(self, sequences: SequenceTable, leases: LeaseTable) -> None:
        self._sequences = sequences
        self._coordinator = sequences.coordinator
        self._block_size = sequences.config.block_size
        self._leases = leases

    def lease_prompt(self, allocation: Allocation, lease_id: str, deadline_s: float) -> LeasedPrefix:
        """The sequence's kept prompt end and the full blocks before it."""
        end = allocation.prompt_end
        assert end is not None
        num_full = end.position // self._block_size
        full = tuple(tuple(table.block_ids[:num_full]) for table in allocation.tables)
        tails = end.tail_block_ids
        own_tails: tuple[int, ...] = ()
        if not self._are_tagged(tails, end.key):
            # The sequence has these rows in open blocks of its own: computed, copied, or about to be copied.
            tails = own_tails = tuple(table.block_ids[num_full] for table in allocation.tables)
            for group, block_id in zip(self._coordinator.groups, own_tails, strict=True):
                group.pool.set_tags((block_id,), (end.key,))
        return self._add(
            lease_id, deadline_s, allocation.keys.key_at, end.position, full, tails, own_tails, end, end.output_row
        )

    def lease_cached(
        self, keys: PrefixKeys, hit: PrefixHit, lease_id: str, deadline_s: float, deeper_than: int
    ) -> LeasedPrefix | None:
        """What a local lookup found, when it is deeper than ``deeper_than`` and there is memory for a copied tail."""
        checkpoint = hit.checkpoint
        if checkpoint is not None:
            position = checkpoint.position
        elif self._sequences.config.has_state:
            return None
        else:
            position = min(map(len, hit.tables), default=0) * self._block_size
        if position <= deeper_than:
            return None
        num_full = position // self._block_size
        full = tuple(table[:num_full] for table in hit.tables)
        tails = checkpoint.tail_block_ids if checkpoint is not None else ()
        lease: LeasedPrefix | None
        if checkpoint is None or self._are_tagged(tails, checkpoint.key):
            lease = self._add(lease_id, deadline_s, keys.key_at, position, full, tails, (), checkpoint, hit.output_row)
        else:
            lease = self._lease_copied_tails(lease_id, deadline_s, keys, full, checkpoint, hit.output_row)
        if lease is not None and checkpoint is not None:
            self._coordinator.state.touch(checkpoint)
        return lease

    def _lease_copied_tails(
        self,
        lease_id: str,
        deadline_s: float,
        keys: PrefixKeys,
        full: Tables,
        checkpoint: Checkpoint,
        output_row: Any | None,
    ) -> LeasedPrefix | None:
        coordinator = self._coordinator
        # First pin what was found, then allocate: allocation may evict it otherwise.
        coordinator.pin(checkpoint)
        for group, table in zip(coordinator.groups, full, strict=True):
            group.pool.hold(filter(None, table))
        lease = None
        if coordinator.can_allocate([1] * len(coordinator.groups), 0):
            tails = []
            for group_id, (group, source) in enumerate(zip(coordinator.groups, checkpoint.tail_block_ids, strict=True)):
                tails += coordinator.allocate_blocks(group, 1)
                self._sequences.copies[group_id].push(source, tails[-1])
                group.pool.set_tags(tails[-1:], (checkpoint.key,))
            own = tuple(tails)
            lease = self._add(
                lease_id, deadline_s, keys.key_at, checkpoint.position, full, own, own, checkpoint, output_row
            )
            for group, block_id in zip(coordinator.groups, own, strict=True):
                group.pool.drop((block_id,))
        for group, table in zip(coordinator.groups, full, strict=True):
            group.pool.drop(filter(None, reversed(table)))
        coordinator.unpin(checkpoint)
        return lease

    def lease_closure(self, key: bytes, lease_id: str, deadline_s: float) -> LeasedClosure | None:
        """A checkpoint with what resuming there reads; None: it is not here whole. Copies nothing: of the tail blocks
        only the rows are final that are the tail's."""
        checkpoint = self._coordinator.state.get(key)
        if checkpoint is None:
            return None
        num_blocks = (checkpoint.position - len(checkpoint.tail_tokens)) // self._block_size
        tables: list[tuple[int, ...]] = []
        chains: list[tuple[bytes, ...]] = []
        keys: dict[int, bytes] = {}
        for group in self._coordinator.groups:
            first = min(group.first_needed(checkpoint.position), num_blocks)
            chain = group.chain_to(checkpoint.boundary_key, num_blocks - first)
            if chain is None:
                return None
            block_ids = tuple(map(group.get, chain))
            before = group.parent_key(block_ids[0]) if block_ids else checkpoint.boundary_key
            tables.append((0,) * first + block_ids)
            chains.append((before, *chain))
            keys.update(((first + index) * self._block_size, each) for index, each in enumerate(chain, start=1))
        prefix = self._add(
            lease_id, deadline_s, keys.__getitem__, num_blocks * self._block_size, tuple(tables), (), (), checkpoint,
            checkpoint.output_row,
        )  # fmt: skip
        tails = zip(self._coordinator.groups, checkpoint.tail_block_ids, strict=False)
        return LeasedClosure(
            prefix, checkpoint, tuple(chains), tuple(group.pool.generation(block_id) for group, block_id in tails)
        )

    def _are_tagged(self, block_ids: tuple[int, ...], key: bytes) -> bool:
        tag = content_tag(key)
        return all(
            group.pool.tag(block_id) == tag
            for group, block_id in zip(self._coordinator.groups, block_ids, strict=False)
        )

    def _add(
        self,
        lease_id: str,
        deadline_s: float,
        key_at: Callable[[int], bytes],
        num_tokens: int,
        full: Tables,
        tails: tuple[int, ...],
        own_tails: tuple[int, ...],
        checkpoint: Checkpoint | None,
        output_row: Any | None,
    ) -> LeasedPrefix:
        """``own_tails``: those of ``tails`` that are not the checkpoint's, () when all are."""
        assert lease_id not in self._leases, f"lease {lease_id} exists"  # before anything is pinned for it
        coordinator = self._coordinator
        pinned = _append(full, own_tails)
        for group, table in zip(coordinator.groups, pinned, strict=True):
            group.pool.lease(filter(None, table))
        if checkpoint is not None:
            coordinator.lease(checkpoint)
        slot_id = checkpoint.slot_id if checkpoint is not None else 0
        tables = _append(full, tails)
        prefix = LeasedPrefix(
            num_tokens=num_tokens,
            tables=tables,
            generations=self._generations(tables),
            slot_id=slot_id,
            slot_generation=coordinator.slots.generation(slot_id) if slot_id else 0,
            key=checkpoint.key if checkpoint is not None else key_at(num_tokens),
            output_row=output_row,
        )
        self._leases.add(Lease(lease_id, prefix, key_at, pinned, checkpoint), deadline_s)
        return prefix

    def _generations(self, tables: Tables) -> Tables:
        return tuple(
            group.pool.generations(table) for group, table in zip(self._coordinator.groups, tables, strict=True)
        )

    def end(self, lease: Lease) -> None:
        """Give back what the lease pinned, tail first."""
        if lease.checkpoint is not None:
            self._coordinator.end_lease(lease.checkpoint)
        for group, copies, table in zip(self._coordinator.groups, self._sequences.copies, lease.tables, strict=True):
            copies.cancel(table)
            group.pool.end_lease(filter(None, reversed(table)))

    def progress(self, allocation: Allocation) -> PrefixProgress:
        """The full blocks that are computed, from the start of the prompt."""
        num_full = min(allocation.num_computed_tokens, allocation.num_prompt_tokens) // self._block_size
        tables = tuple(tuple(islice(table.block_ids, num_full)) for table in allocation.tables)
        return PrefixProgress(num_full * self._block_size, tables, self._generations(tables))


def _append(tables: Tables, tails: tuple[int, ...]) -> Tables:
    return tuple((*table, tail) for table, tail in zip(tables, tails, strict=True)) if tails else tables

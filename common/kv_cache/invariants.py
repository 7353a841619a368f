"""Is every unit accounted for? Recomputes the bookkeeping from its holders.

Run after every operation in tests, and on demand:
free + cached + held + leased + quarantined = total for each pool, reference counts equal the holders, every table entry
is valid, every index agrees with every other, the tag of every published or leased unit is that of its content.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from common.kv_cache.checkpoints.checkpoint import Checkpoint
from common.kv_cache.coordinator import Coordinator
from common.kv_cache.pools.generations import content_tag
from common.kv_cache.pools.unit_pool import UnitPool
from common.kv_cache.sequences.allocation import Allocation
from common.kv_cache.sequences.sequence_table import SequenceTable
from common.kv_cache.sharing.leases import Lease, LeaseTable


def find_violations(
    coordinator: Coordinator,
    sequences: SequenceTable,
    leases: LeaseTable,
    quarantined: Mapping[str, tuple[tuple[list[int], ...], list[int]]],
) -> list[str]:
    """Violations in words, [] when there are none. O(units + table entries)."""
    problems: list[str] = []
    users = _Users(coordinator)
    for allocation in sequences:
        for table, counts in zip(allocation.tables, users.held_blocks, strict=True):
            counts.update(table.block_ids)
        users.held_slots.update(save.slot_id for save in allocation.saves.values())
        users.held_slots.update(allocation.rollback.values())
        users.held_slots.update((allocation.dst_slot, allocation.other_slot))
        for checkpoint in (allocation.src_checkpoint, allocation.prompt_end):
            if checkpoint is not None:
                users.pins[id(checkpoint)] += 1
                users.add_checkpoint(checkpoint, users.held_blocks, users.held_slots)
        problems += _check_sequence(coordinator, sequences, allocation)
    for copies, counts in zip(sequences.copies, users.held_blocks, strict=True):
        counts.update(copies.sources())
    for lease in leases.active():
        for block_ids, counts in zip(lease.tables, users.leased_blocks, strict=True):
            counts.update(block_ids)
        if lease.checkpoint is not None:
            users.lease_pins[id(lease.checkpoint)] += 1
            users.add_checkpoint(lease.checkpoint, users.leased_blocks, users.leased_slots)
        problems += _check_lease(coordinator, lease)
    for group, counts in zip(coordinator.groups, users.named_blocks, strict=True):
        for key, block_id in group.items():
            counts[block_id] += 1
            if group.key_of(block_id) != key:
                problems.append(f"{group.pool.name} {block_id} does not know its key")
            if group.pool.tag(block_id) != content_tag(key):
                problems.append(f"{group.pool.name} {block_id} has another prefix's tag")
    for full_group in coordinator.full_groups:
        for block_id in full_group.marked_ids():
            if full_group.key_of(block_id) is None:
                problems.append(f"null entry on block {block_id} outlived its attention entry")
    for checkpoint in coordinator.state:
        users.add_checkpoint(checkpoint, users.named_blocks, users.named_slots)
        expected_pins = (users.pins[id(checkpoint)], users.lease_pins[id(checkpoint)])
        if (checkpoint.num_pins, checkpoint.num_leases) != expected_pins:
            problems.append(f"checkpoint at {checkpoint.position}: pins do not equal its users")
        if not checkpoint.is_pinned and not coordinator.hangs_on_cache(checkpoint):
            problems.append(f"checkpoint at {checkpoint.position} outlived its attention block")
        if bool(checkpoint.slot_id) != coordinator.config.has_state:
            problems.append(f"checkpoint at {checkpoint.position} has slot {checkpoint.slot_id}")
        if checkpoint.slot_id and coordinator.slots.tag(checkpoint.slot_id) != content_tag(checkpoint.key):
            problems.append(f"slot {checkpoint.slot_id} has another prefix's tag")
        if checkpoint.position - len(checkpoint.tail_tokens) != (
            checkpoint.position // coordinator.config.block_size * coordinator.config.block_size
        ):
            problems.append(f"checkpoint at {checkpoint.position} has {len(checkpoint.tail_tokens)} tail tokens")
    late_slots = [slot_id for _, slot_ids in quarantined.values() for slot_id in slot_ids]
    for group_id, group in enumerate(coordinator.groups):
        late = [block_id for tables, _ in quarantined.values() for block_id in tables[group_id]]
        held, leased, named = (c[group_id] for c in (users.held_blocks, users.leased_blocks, users.named_blocks))
        problems += _check_pool(group.pool, held, leased, named, late)
    problems += _check_pool(coordinator.slots, users.held_slots, users.leased_slots, users.named_slots, late_slots)
    return problems


class _Users:
    """Who uses each unit, counted from the users' side."""

    def __init__(self, coordinator: Coordinator) -> None:
        self.held_blocks: list[Counter[int]] = [Counter() for _ in coordinator.groups]
        self.leased_blocks: list[Counter[int]] = [Counter() for _ in coordinator.groups]
        self.named_blocks: list[Counter[int]] = [Counter() for _ in coordinator.groups]
        self.held_slots: Counter[int] = Counter()
        self.leased_slots: Counter[int] = Counter()
        self.named_slots: Counter[int] = Counter()
        self.pins: Counter[int] = Counter()
        self.lease_pins: Counter[int] = Counter()

    @staticmethod
    def add_checkpoint(checkpoint: Checkpoint, blocks: list[Counter[int]], slots: Counter[int]) -> None:
        slots[checkpoint.slot_id] += 1
        for counts, block_id in zip(blocks, checkpoint.tail_block_ids, strict=False):
            counts[block_id] += 1


def _check_lease(coordinator: Coordinator, lease: Lease) -> list[str]:
    """What the reader was told must hold until the lease ends: its generations, and the tags that it will compute."""
    problems = []
    prefix, size = lease.prefix, coordinator.config.block_size
    for group, table, generations in zip(coordinator.groups, prefix.tables, prefix.generations, strict=True):
        for index, (block_id, generation) in enumerate(zip(table, generations, strict=True)):
            if not block_id:
                continue
            key = lease.key_at(min((index + 1) * size, prefix.num_tokens))
            if (group.pool.generation(block_id), group.pool.tag(block_id)) != (generation, content_tag(key)):
                problems.append(f"lease {lease.lease_id}: {group.pool.name} {block_id} is not what its reader was told")
    slots, slot_id = coordinator.slots, prefix.slot_id
    told = (prefix.slot_generation, content_tag(prefix.key))
    if slot_id and (slots.generation(slot_id), slots.tag(slot_id)) != told:
        problems.append(f"lease {lease.lease_id}: slot {slot_id} is not what its reader was told")
    return problems


def _check_sequence(coordinator: Coordinator, sequences: SequenceTable, allocation: Allocation) -> list[str]:
    problems = []
    name, size = f"sequence {allocation.seq_id}", coordinator.config.block_size
    position = allocation.num_computed_tokens if allocation.pull is None else allocation.num_prompt_tokens
    for group, table, _ in sequences.rows(allocation):
        block_ids = table.block_ids[table.first_block :]
        if len(set(block_ids)) != len(block_ids):
            problems.append(f"{name}: a block is in its table twice")
        if any(not 0 < block_id < group.pool.num_units for block_id in block_ids):
            problems.append(f"{name}: a table entry is null or outside the pool")
        if any(table.block_ids[: table.first_block]):
            problems.append(f"{name}: a block is held that its window has left")
        if table.first_block > group.first_needed(position):
            problems.append(f"{name}: a block is gone that its window still covers")
        if len(table.block_ids) < sequences.blocks_for(allocation.num_computed_tokens):
            problems.append(f"{name}: {len(table.block_ids)} blocks for {allocation.num_computed_tokens} tokens")
        first_open = max(allocation.num_computed_tokens, table.write_from) // size
        for block_id in table.block_ids[first_open:]:
            if group.pool.content[block_id] and not allocation.is_sealed:
                problems.append(f"{name}: published block {block_id} is still to be written")
    if (
        coordinator.config.has_state
        and allocation.dst_slot
        and coordinator.slots.content[allocation.dst_slot]
        and not allocation.is_sealed
    ):
        problems.append(f"{name}: published slot {allocation.dst_slot} is still to be written")
    if coordinator.config.has_state and not allocation.dst_slot:
        problems.append(f"{name}: no running slot")
    return problems


def _check_pool(
    pool: UnitPool, held: Counter[int], leased: Counter[int], named: Counter[int], quarantined: list[int]
) -> list[str]:
    problems = []
    free, cached = set(pool.free_ids()), set(pool.cached_ids())
    counted: Counter[str] = Counter()
    if len(free) != pool.num_free:
        problems.append(f"{pool.name}: a unit is free twice")
    if pool.quarantined != set(quarantined):
        problems.append(f"{pool.name}: quarantined units do not equal their owners'")
    for unit_id in range(1, pool.num_units):
        for what, count, expected in (
            ("held", pool.held[unit_id], held[unit_id]),
            ("leased", pool.leased[unit_id], leased[unit_id]),
            ("named", pool.content[unit_id], named[unit_id]),
        ):
            if count != expected:
                problems.append(f"{pool.name} {unit_id}: {what} {count} times, {expected} owners")
        if unit_id in pool.quarantined:
            state = "quarantined"
        elif held[unit_id]:
            state = "held"
        elif leased[unit_id]:
            state = "leased"
        else:
            state = "cached" if named[unit_id] else "free"
        counted[state] += 1
        if (unit_id in free) != (state == "free") or (unit_id in cached) != (state == "cached"):
            problems.append(f"{pool.name} {unit_id}: {state}, but listed otherwise")
    if any(pool.counts()[state] != counted[state] for state in pool.counts()):
        problems.append(f"{pool.name}: counts {pool.counts()} are not {dict(counted)}")
    if pool.num_units and sum(pool.counts().values()) != pool.num_units - 1:
        problems.append(f"{pool.name}: {pool.counts()} do not add up to {pool.num_units - 1}")
    if pool.held[0] or pool.leased[0] or pool.content[0] or 0 in free or 0 in cached or 0 in pool.quarantined:
        problems.append(f"{pool.name}: the null entry is in use")
    return problems

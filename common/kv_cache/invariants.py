"""Is every unit accounted for? Recomputes the bookkeeping from its holders.

Run after every operation in tests, and on demand:
free + cached + held + leased + quarantined = total for each pool, reference counts equal the holders, every table entry
is valid, every index agrees with every other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping

from common.kv_cache.coordinator import Coordinator
from common.kv_cache.leases import LeaseTable
from common.kv_cache.sequence_table import SequenceTable
from common.kv_cache.unit_pool import UnitPool


def check(
    coordinator: Coordinator,
    sequences: SequenceTable,
    leases: LeaseTable,
    quarantined: Mapping[str, tuple[list[int], list[int]]],
) -> list[str]:
    """Violations in words, [] when there are none. O(units + table entries)."""
    problems: list[str] = []
    held_blocks, held_slots = _holders(sequences)
    pins: Counter[int] = Counter()
    for seq in sequences:
        for checkpoint in (seq.src_checkpoint, seq.prompt_end):
            if checkpoint is None:
                continue
            pins[id(checkpoint)] += 1
            held_blocks[checkpoint.tail_block_id] += 1
            held_slots[checkpoint.slot_id] += 1
        problems += _check_sequence(coordinator, sequences, seq.seq_id)
    leased_blocks: Counter[int] = Counter()
    leased_slots: Counter[int] = Counter()
    lease_pins: Counter[int] = Counter()
    for lease in leases.active():
        leased_blocks.update(lease.block_ids)
        leased_blocks[lease.prompt_end.tail_block_id] += 1
        leased_slots[lease.prompt_end.slot_id] += 1
        lease_pins[id(lease.prompt_end)] += 1
    named_blocks: Counter[int] = Counter()
    named_slots: Counter[int] = Counter()
    for key, block_id in coordinator.attention.items():
        named_blocks[block_id] += 1
        if coordinator.attention.key_of(block_id) != key:
            problems.append(f"block {block_id} does not know its key")
    for block_id in coordinator.attention.marked_ids():
        if coordinator.attention.key_of(block_id) is None:
            problems.append(f"null entry on block {block_id} outlived its attention entry")
    for checkpoint in coordinator.state:
        named_blocks[checkpoint.tail_block_id] += 1
        named_slots[checkpoint.slot_id] += 1
        if (checkpoint.num_pins, checkpoint.num_leases) != (pins[id(checkpoint)], lease_pins[id(checkpoint)]):
            problems.append(f"checkpoint at {checkpoint.position}: pins do not equal its users")
        if not checkpoint.is_pinned and not coordinator.hangs_on_cache(checkpoint):
            problems.append(f"checkpoint at {checkpoint.position} outlived its attention block")
        if bool(checkpoint.slot_id) != coordinator.config.has_state:
            problems.append(f"checkpoint at {checkpoint.position} has slot {checkpoint.slot_id}")
    late_blocks = [block_id for block_ids, _ in quarantined.values() for block_id in block_ids]
    late_slots = [slot_id for _, slot_ids in quarantined.values() for slot_id in slot_ids]
    problems += _check_pool(coordinator.blocks, held_blocks, leased_blocks, named_blocks, late_blocks)
    problems += _check_pool(coordinator.slots, held_slots, leased_slots, named_slots, late_slots)
    return problems


def _holders(sequences: SequenceTable) -> tuple[Counter[int], Counter[int]]:
    blocks: Counter[int] = Counter(sequences.copies.sources())
    slots: Counter[int] = Counter()
    for seq in sequences:
        blocks.update(seq.block_ids)
        slots.update(seq.saves.values())
        slots[seq.dst_slot] += 1
    return blocks, slots


def _check_sequence(coordinator: Coordinator, sequences: SequenceTable, seq_id: str) -> list[str]:
    seq, problems = sequences[seq_id], []
    if len(set(seq.block_ids)) != len(seq.block_ids):
        problems.append(f"sequence {seq_id}: a block is in its table twice")
    if any(not 0 < block_id < coordinator.blocks.num_units for block_id in seq.block_ids):
        problems.append(f"sequence {seq_id}: a table entry is null or outside the pool")
    if len(seq.block_ids) < sequences.blocks_for(seq.num_computed_tokens):
        problems.append(f"sequence {seq_id}: {len(seq.block_ids)} blocks for {seq.num_computed_tokens} tokens")
    first_open = max(seq.num_computed_tokens, seq.write_from) // coordinator.config.block_size
    for block_id in seq.block_ids[first_open:]:
        if coordinator.blocks.content[block_id] and not seq.is_sealed:
            problems.append(f"sequence {seq_id}: published block {block_id} is still to be written")
    if coordinator.config.has_state and seq.dst_slot and coordinator.slots.content[seq.dst_slot] and not seq.is_sealed:
        problems.append(f"sequence {seq_id}: published slot {seq.dst_slot} is still to be written")
    if coordinator.config.has_state and not seq.dst_slot:
        problems.append(f"sequence {seq_id}: no running slot")
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

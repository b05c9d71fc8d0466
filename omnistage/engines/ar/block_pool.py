"""The pool of KV blocks: reference counts, prefix reuse by content hash, least-recently-used eviction.

Plain Python, no tensors. A block is *free* when nobody holds it; a free block may still hold published content and
is then handed out again either by its hash (`match` + `acquire`) or, oldest first, for new content.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from omnistage.core.errors import InternalError


def block_hash(parent: bytes, token_ids: Sequence[int], extra: Sequence[bytes] = ()) -> bytes:
    """Digest of a full block given its parent's digest. `extra` names media that overlap the block."""
    digest = hashlib.blake2b(parent, digest_size=16)
    digest.update(array("q", token_ids).tobytes())
    for part in extra:
        digest.update(len(part).to_bytes(4, "little"))
        digest.update(part)
    return digest.digest()


class BlockPool:
    """`num_blocks` blocks of `block_size` tokens each."""

    def __init__(self, num_blocks: int, block_size: int, *, prefix_caching: bool = True) -> None:
        if num_blocks < 1 or block_size < 1:
            raise InternalError(f"a pool needs blocks of at least one token, got {num_blocks} of {block_size}")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.prefix_caching = prefix_caching
        self._references = [0] * num_blocks
        self._hash_of: dict[int, bytes] = {}
        self._block_of: dict[bytes, int] = {}
        # Free blocks, the next one to reuse first. Never-used blocks come before those with content worth keeping.
        self._free: OrderedDict[int, None] = OrderedDict.fromkeys(range(num_blocks))
        self.hits = 0
        self.lookups = 0
        """Full blocks that admitted sequences could have reused at best, and `hits`, those that they did."""

    @property
    def free_blocks(self) -> int:
        return len(self._free)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def match(self, hashes: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest known prefix of `hashes`. Takes no reference."""
        if not self.prefix_caching:
            return []
        blocks: list[int] = []
        for value in hashes:
            block = self._block_of.get(value)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def allocate(self, count: int, after: int | None = None) -> list[int] | None:
        """`count` blocks for new content, or None (and nothing taken) when there is no room.

        Where the next block by number, from that `after` on, is free and holds nothing worth keeping, it is taken:
        keys and values of a sequence whose blocks are adjacent are read in place on the CPU.
        """
        if count > len(self._free):
            return None
        blocks: list[int] = []
        for _ in range(count):
            block = -1 if after is None else after + 1
            if block in self._free and block not in self._hash_of:
                del self._free[block]
            else:
                block, _none = self._free.popitem(last=False)
            after = block
            old = self._hash_of.pop(block, None)
            if old is not None:
                del self._block_of[old]
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def acquire(self, blocks: Iterable[int]) -> None:
        """Take one more reference on each block (after `match`)."""
        for block in blocks:
            if self._references[block] == 0:
                del self._free[block]
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Give one reference back on each block. The tail of a sequence is reused before its head."""
        for block in reversed(blocks):
            if self._references[block] == 0:
                raise InternalError(f"block {block} released more often than taken")
            self._references[block] -= 1
            if self._references[block] == 0:
                self._free[block] = None
                if block not in self._hash_of:
                    self._free.move_to_end(block, last=False)

    def publish(self, block: int, value: bytes) -> None:
        """Say that `block` is full and holds the content with this hash. The first publisher of a hash wins."""
        if self.prefix_caching and value not in self._block_of and block not in self._hash_of:
            self._block_of[value] = block
            self._hash_of[block] = value

    def forget_prefixes(self) -> None:
        """Drop all reusable content; blocks in use stay with their owners."""
        self._block_of.clear()
        self._hash_of.clear()

    def check(self, owners: Iterable[Sequence[int]]) -> None:
        """Raise unless references, free list and hashes agree with the block tables of all `owners`."""
        references = [0] * self.num_blocks
        for table in owners:
            if len(set(table)) != len(table):
                raise InternalError("a block is in one table twice")
            for block in table:
                references[block] += 1
        if references != self._references:
            wrong = [b for b in range(self.num_blocks) if references[b] != self._references[b]]
            raise InternalError(f"blocks leaked or double-owned: {wrong[:8]}")
        if set(self._free) != {b for b in range(self.num_blocks) if references[b] == 0}:
            raise InternalError("the free list does not match the reference counts")
        if {h: b for b, h in self._hash_of.items()} != self._block_of:
            raise InternalError("the hash tables disagree")

"""Host-side bookkeeping of the paged cache: which block ids are free."""

from collections.abc import Iterable

from specdec.models.batch import NULL_BLOCK


def blocks_for(num_tokens: int, block_size: int) -> int:
    """Blocks that hold `num_tokens` slots."""
    return -(-num_tokens // block_size)


class BlockPool:
    """A stack of free block ids. `NULL_BLOCK` is never in it: padding rows write there."""

    def __init__(self, num_blocks: int):
        self.num_blocks = num_blocks
        self.free = [b for b in range(num_blocks - 1, -1, -1) if b != NULL_BLOCK]

    def take_(self, count: int) -> list[int]:
        """Remove and return the top `count` ids, the ones `schedule` saw at the stack's end."""
        taken = self.free[len(self.free) - count :][::-1]
        del self.free[len(self.free) - count :]
        return taken

    def release_(self, blocks: Iterable[int]) -> None:
        self.free.extend(blocks)

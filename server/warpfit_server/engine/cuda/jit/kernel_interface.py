"""Arguments and outputs of a compiled kernel."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from warpfit_server.engine.cuda.jit.shapes import Shape

#: Byte offset of each argument, a 64-bit word, in the block that the first kernel parameter points
#: to.
ARGUMENT_OFFSETS: Final = {
    name: 8 * index
    for index, name in enumerate(
        (
            "variables",  # address of the matrix at the first row of the first block
            "stride",  # lines of `LINE_BYTES` from one variable to the next, below 2^32
            "target",  # address of the target at that row
            "weights",  # address of the weights at that row
            "head",  # rows between the first block's first row and the first row of the range
            "stop",  # rows from the first block's first row to the end of the range, below 2^31
            "block_rows",  # rows of a block, a power of two; see `block_rows`
            "first_block",  # number of the first block, counted from the data set's first row
            "block_count",  # blocks that have some of the rows
            "input_stride",  # bytes from one parameter vector's inputs to the next
            "partials",  # address of float64 [sums, K, block_count, warps]
            "values",  # address of the values of the first row of the range
            "pitch",  # bytes from the values of one program and vector to the next
        )
    )
}
#: Unit of strides, so that 32 bits suffice for columns of 512 GiB.
LINE_BYTES: Final = 128
ARGUMENT_BYTES: Final = 8 * len(ARGUMENT_OFFSETS)


@dataclass(frozen=True, slots=True)
class Output:
    """Outputs of a kernel for each expression, and the layout of its rows."""

    values: bool = False
    """Store the values of all rows."""
    loss: str = ""
    """Sum up ``"squares"`` or ``"absolute"`` deviations from the target; empty for neither."""
    weighted: bool = False
    """Multiply each deviation by the row's weight."""
    gradient: bool = False
    """Sum up the derivatives of half the squares, or of the absolute deviations, by each input in
    `Shape.wanted`, too."""
    threads: int = 128
    """Threads of a block: warps, of which there are a power of two."""
    rows: int = 4
    """Rows a thread works on at a time: 1, 2 or 4, at most 2 in float64. The address of a block's
    first row is a multiple of this many values."""

    @property
    def tile(self) -> int:
        """Rows that a block of threads works on at a time, a power of two."""
        return self.threads * self.rows


#: Blocks of rows that few rows are divided into at least, and most rows of a block.
_LEAST_BLOCKS: Final = 64
MAX_BLOCK_ROWS: Final = 4096


def block_rows(output: Output, rows: int) -> int:
    """Return the rows of a block, whose sums are partial sums; at least those of a tile.

    A kernel has at most one block of threads for each block of rows, so that few rows need short
    ones; each takes a reduction, which costs as much as a few rows for each thread.

    Args:
        output: of the kernel.
        rows: of the evaluation, on however many launches and devices they are.
    """
    wanted = 1 << (-(-rows // _LEAST_BLOCKS) - 1).bit_length()
    return max(output.tile, min(wanted, MAX_BLOCK_ROWS))


def sum_count(output: Output, shape: Shape) -> int:
    """Return the number of sums over the rows for one expression."""
    if not output.loss:
        return 0
    return 1 + len(shape.wanted) * output.gradient


def load_argument(name: str, register: str, width: str) -> list[str]:
    """Return the PTX that loads an argument."""
    return [f"ld.global.nc.{width} {register}, [%request+{ARGUMENT_OFFSETS[name]}];"]


def load_address(name: str, register: str) -> list[str]:
    """Return the PTX that loads an argument which is an address."""
    return [*load_argument(name, register, "u64"), f"cvta.to.global.u64 {register}, {register};"]

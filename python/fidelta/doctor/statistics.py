"""Each tensor's values, read once, block by block."""

from dataclasses import dataclass

import numpy as np

BLOCK = 1 << 22  # elements widened at once


@dataclass
class Statistics:
    """Of one tensor: counts, and moments over its finite values. zero_rows counts rows of the first axis."""

    name: str
    shape: tuple
    nan: int = 0
    inf: int = 0
    zero_rows: np.ndarray | None = None
    mean: float = 0.0
    std: float = 0.0
    absmax: float = 0.0
    low: float = 0.0
    high: float = 0.0

    @property
    def constant(self):
        return self.low == self.high


def measure(name, array):
    """Statistics of a NumPy array of any float type, at most BLOCK elements in float32 at a time."""
    found = Statistics(name, tuple(array.shape))
    if array.size == 0 or array.dtype.kind in "iub":
        return found
    rows = array.reshape(array.shape[0], -1) if array.ndim else array.reshape(1, 1)
    step = max(1, BLOCK // max(rows.shape[1], 1))
    zero_rows, low, high, total, squares, count = [], np.inf, -np.inf, 0.0, 0.0, 0
    for start in range(0, len(rows), step):
        block = rows[start:start + step].astype(np.float32)
        finite = np.isfinite(block)
        if not finite.all():
            found.nan += int(np.isnan(block).sum())
            found.inf += int(np.isinf(block).sum())
            zero_rows.append(~(block != 0).any(1))
            block = block[finite]
        else:
            zero_rows.append(~block.any(1))
        if block.size:
            low, high = min(low, float(block.min())), max(high, float(block.max()))
            total += float(block.sum(dtype=np.float64))
            squares += float(np.vdot(block, block)) if block.size < 1 << 16 else float(
                np.einsum("i,i->", block.ravel(), block.ravel(), dtype=np.float64))
            count += block.size
    found.zero_rows = np.concatenate(zero_rows)
    if count:
        found.low, found.high, found.absmax = low, high, max(abs(low), abs(high))
        found.mean = total / count
        found.std = max(squares / count - found.mean**2, 0.0) ** 0.5
    return found

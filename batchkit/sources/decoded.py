"""How much memory Arrow's values take as Python objects, and batches cut to keep it small."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

VALUE_BYTES = 32  # about the size of the smallest Python value
_Sizes = npt.NDArray[np.int64]


class Slice(NamedTuple):
    """Rows of a batch that together take ``n_bytes`` as Python objects."""

    batch: Any
    n_bytes: int


def slices(batch: Any, target_bytes: int) -> Iterator[Slice]:
    """All rows of ``batch``, as many at a time as fit in ``target_bytes``, but at least one."""
    sizes = sum((decoded_bytes(column) for column in batch.columns), _none(batch.num_rows))
    ends = np.cumsum(sizes)
    start = before = 0
    while start < batch.num_rows:
        end = max(start + 1, int(np.searchsorted(ends, before + target_bytes, "right")))
        yield Slice(batch.slice(start, end - start), int(ends[end - 1]) - before)
        start, before = end, int(ends[end - 1])


def decoded_bytes(array: Any) -> _Sizes:
    """Bytes of each value, including the values in it; each value of a dictionary counts as often
    as it is used."""
    kind = array.type
    if isinstance(array, pa.ExtensionArray):
        return decoded_bytes(array.storage)
    if pa.types.is_dictionary(kind):
        of_value: _Sizes = np.append(decoded_bytes(array.dictionary), VALUE_BYTES)  # last: null
        indices = pc.fill_null(array.indices.cast(pa.int64()), len(of_value) - 1)
        used: _Sizes = np.take(of_value, indices.to_numpy())
        return used
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_map(kind):
        children = [array.keys, array.items] if pa.types.is_map(kind) else [array.values]
        inner = sum(map(decoded_bytes, children), _none(len(children[0])))
        ends = np.append(0, np.cumsum(inner))
        offsets = array.offsets.to_numpy()
        sizes: _Sizes = VALUE_BYTES + ends[offsets[1:]] - ends[offsets[:-1]]
        return sizes
    if pa.types.is_struct(kind):
        fields = (decoded_bytes(array.field(number)) for number in range(kind.num_fields))
        return sum(fields, _none(len(array))) + VALUE_BYTES
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or _is_large(kind):
        lengths = pc.fill_null(pc.binary_length(array).cast(pa.int64()), 0)
        return np.asarray(lengths) + VALUE_BYTES
    each = array.nbytes // max(1, len(array))
    return np.full(len(array), max(VALUE_BYTES, each), np.int64)


def _is_large(kind: Any) -> bool:
    return bool(pa.types.is_large_string(kind) or pa.types.is_large_binary(kind))


def _none(n_values: int) -> _Sizes:
    return np.zeros(n_values, np.int64)

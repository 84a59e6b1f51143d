"""Every producer's layout: written as the producer writes it, read back, equal."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rar_lib.traces.trace import RouteTrace
from rar_lib.traces.wire import read_trace
from tests.traces.writers import LAYOUTS, Batch, Layout, make_batch

DENSE_FIRST, ALTERNATING, EVERY = (4, (1, 2, 3)), (4, (1, 3)), (2, (0, 1))
SIZES = [(e, k) for e in (8, 64, 128, 256, 257, 300, 512) for k in (1, 2, 8)]


def read(layout: Layout, batch: Batch, folder: Path) -> RouteTrace:
    path = layout.write(batch, folder / layout.name)
    return read_trace(path, model=batch.model, **layout.options)


def check(layout: Layout, batch: Batch, trace: RouteTrace) -> None:
    """Same ids, states and tokens; rows that were dropped on purpose are missing, never something else."""
    expected = batch.trace()
    assert trace.header.producer == layout.format
    assert trace.header.moe_layers == batch.model.moe_layers
    assert trace.experts.dtype == expected.experts.dtype
    assert trace.lengths.tolist() == expected.lengths.tolist()
    if layout.ids:
        assert trace.token_digest == expected.token_digest
    got, want = trace.ids(), expected.ids()
    got, want = (got, want) if layout.ordered else (np.sort(got, -1), np.sort(want, -1))
    dropped = ~trace.recorded & expected.recorded
    for start, length in zip(expected.offsets[:-1], expected.lengths, strict=True):
        assert not dropped[start + min(layout.first, length) : start + length].any()
    assert np.array_equal(got[~dropped], want[~dropped])
    assert (trace.recorded <= expected.recorded).all()


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize(
    ("layers", "moe"), [DENSE_FIRST, ALTERNATING, EVERY], ids=["dense-first", "alternating", "every"]
)
def test_written_then_read_is_equal(name: str, layers: int, moe: tuple[int, ...], tmp_path: Path) -> None:
    layout = LAYOUTS[name]
    for number, (e, k) in enumerate(SIZES):
        batch = make_batch(e, k, layers, moe, [(3, 4), (1, 1), (5, 2), (1, 6)], seed=number)
        check(layout, batch, read(layout, batch, tmp_path))


lengths = st.lists(st.tuples(st.integers(1, 4), st.integers(0, 5)), min_size=1, max_size=4).filter(
    lambda pairs: any(p + r > 1 for p, r in pairs)
)


@pytest.mark.parametrize("name", LAYOUTS)
@settings(deadline=None, max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(lengths, st.sampled_from(SIZES), st.sampled_from([DENSE_FIRST, ALTERNATING, EVERY]), st.integers(0, 99))
def test_round_trip_of_any_lengths(name: str, tmp_path: Path, lengths: Any, size: Any, axis: Any, seed: int) -> None:
    layout = LAYOUTS[name]
    batch = make_batch(*size, *axis, lengths, seed)
    check(layout, batch, read(layout, batch, tmp_path))

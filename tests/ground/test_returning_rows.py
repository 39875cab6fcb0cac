"""Whether the same rows come again, told from what a few of the first ones do."""

from __future__ import annotations

import torch
from models import draw

from natgrad.ground.returning_rows import ENOUGH, WATCHED, count_passes, hash_rows, join_returns


def watch(rows: torch.Tensor | None, steps: int, batch: int = 50) -> tuple[float, int]:
    """The mean returns of a watched row, and the examples seen. None: a stream."""
    known, generator = None, torch.Generator().manual_seed(3)
    for step in range(steps):
        if rows is None:
            known = join_returns(known, draw(batch, 4, seed=step))
        else:
            known = join_returns(known, rows[torch.randint(len(rows), (batch,), generator=generator)])
    assert known is not None
    return known["returns"] / len(known["rows"]), steps * batch


def test_a_row_has_one_number_whatever_else_is_in_the_batch():
    for dtype in (torch.float32, torch.float64):
        rows = draw(500, 7).to(dtype)
        numbers = hash_rows(rows)
        assert len(numbers.unique()) == 500
        assert torch.equal(hash_rows(rows[[400, 3, 17]]), numbers[[400, 3, 17]])


def test_returns_tell_how_many_rows_there_are():
    for rows in (100, 700, 3000):
        returns, seen = watch(draw(rows, 4), 300)
        assert 0.6 * seen / rows - 1 < returns < 1.3 * seen / rows + 0.3


def test_passes_count_as_far_as_rows_are_few_for_the_parameters():
    known = {"rows": torch.zeros(WATCHED), "returns": 5 * WATCHED}  # five passes over 200 rows in 1000 examples
    few = count_passes(known, 1000, 4, 100)
    assert 5 < few < 5.1  # 8 numbers per parameter
    parameters = 10  # 80 per parameter
    assert abs(count_passes(known, 1000, 4, parameters) - few * ENOUGH * parameters / (200 * 4)) < 1e-9
    assert count_passes(known, 1000, 4, 1) == 1
    assert count_passes({"rows": torch.zeros(WATCHED), "returns": 0}, 1000, 4, 100) == 1

"""A table's check names every row that fails."""

from __future__ import annotations

from tests.tables import list_failing_rows


def test_every_failing_row_is_named_with_its_error() -> None:
    def check(dividend: int, divisor: int) -> None:
        assert dividend // divisor == 2, "not two"

    first, second = list_failing_rows(check, ((4, 2), (6, 2), (2, 1), (1, 0)))
    assert first.startswith("6, 2: AssertionError: not two")
    assert second.startswith("1, 0: ZeroDivisionError")

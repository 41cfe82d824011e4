"""Parameters say what they stand for: few are called `found`, `made` or `known`."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from scripts.count_wording import PACKAGES, ROOT, Wording, count_wording

#: Vague parameters in a hundred.
BAR_PERCENT = 1.5


@pytest.mark.dear
@pytest.mark.parametrize("package", PACKAGES)
def test_few_parameters_are_vague(package: str) -> None:
    share = count_wording(ROOT / package).parameters
    assert share.percent <= BAR_PERCENT, Counter(share.vague).most_common()


def count_text(folder: Path, text: str) -> Wording:
    (folder / "module.py").write_text(text)
    return count_wording(folder)


def test_what_is_counted(tmp_path: Path) -> None:
    (tmp_path / "proto").mkdir()
    (tmp_path / "proto" / "generated.py").write_text("def f(found): ...")
    (tmp_path / "link").symlink_to(tmp_path / "proto")
    wording = count_text(
        tmp_path,
        """
class Plan:
    made: int
    size_bytes: int

    def bounded(self, found, /, mesh, *, known=(), **options):
        kept, step = found, mesh
        return sorted(options, key=lambda each: each)

    @property
    def needed(self): ...

    def feed(self, left, right): ...
""",
    )
    assert (wording.parameters.count, wording.parameters.vague) == (7, ("found", "known", "each"))
    assert (wording.fields.count, wording.fields.vague) == (2, ("made",))
    assert (wording.locals.count, wording.locals.vague) == (4, ("made", "kept"))
    assert (wording.functions.count, wording.functions.vague) == (2, ("bounded",))


def test_left_alone_is_no_side(tmp_path: Path) -> None:
    assert count_text(tmp_path, "def take(left, size): ...").parameters.vague == ("left",)

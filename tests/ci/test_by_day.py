"""Long tables of cases, of which the day has the first of each kind."""

from __future__ import annotations

from tests.by_day import first_of_each


def test_the_first_of_each_kind() -> None:
    found = first_of_each(["ab", "ac", "bc", "bd"], lambda case: case[0], str.upper, 1)
    assert [(each.id, each.values, [mark.name for mark in each.marks]) for each in found] == [
        ("AB", (1, "ab"), []),
        ("AC", (1, "ac"), ["nightly"]),
        ("BC", (1, "bc"), []),
        ("BD", (1, "bd"), ["nightly"]),
    ]

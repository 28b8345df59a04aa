"""Which named datasets hold the same records: what was learned from one is not public for the other."""

from __future__ import annotations

Classes = range | None  # None: all of them
LETTERS_FROM = 10  # classes 0 to 9 of EMNIST's larger splits are digits


def share_records(one: str, other: str) -> bool:
    """Whether records of one dataset can be in the other, by names as `load` takes them, e.g. `mnist:0-4`."""
    return any(
        a == b and (of_a is None or of_b is None or set(of_a) & set(of_b))
        for a, of_a in _sources(one)
        for b, of_b in _sources(other)
    )


def _sources(name: str) -> list[tuple[str, Classes]]:
    """Collections that a dataset's records come from, with the classes of them where it is some."""
    plain, _, text = name.strip().lower().partition(":")
    first, _, last = text.partition("-")
    classes = range(int(first), int(last) + 1) if first.isdecimal() and last.isdecimal() else None
    plain = {"cifar10": "cifar-10", "cifar100": "cifar-100"}.get(plain, plain)
    if plain in ("mnist", "emnist-mnist", "emnist-digits"):
        return [("nist-digits", classes)]
    if plain == "emnist-letters":
        return [("nist-letters", None)]
    if not plain.startswith("emnist-"):
        return [(plain, classes)]
    found: list[tuple[str, Classes]] = []
    if classes is None or classes.start < LETTERS_FROM:
        found.append(("nist-digits", classes))
    if classes is None or classes.stop > LETTERS_FROM:
        found.append(("nist-letters", None))  # splits number and merge letters differently
    return found

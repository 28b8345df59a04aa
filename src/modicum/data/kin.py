"""Which named datasets hold the same records: what was learned from one is not public for the other."""

from __future__ import annotations

import re
from collections.abc import Iterable

from modicum.errors import UserError

Classes = range | None  # None: all of them
LETTERS_FROM = 10  # classes 0 to 9 of EMNIST's larger splits are digits
DIGITS, LETTERS = "nist-digits", "nist-letters"
CIFAR = ("cifar10", "cifar100")
COLLECTIONS = {  # where records come from, by a name without its marks
    **{name: (name,) for name in (*CIFAR, "svhn", "fashionmnist", "digits", "breastcancer", "heartdisease")},
    **dict.fromkeys(("cifar", "tinyimages", "80milliontinyimages"), CIFAR),
    "cinic10": ("cifar10",),
    "fmnist": ("fashionmnist",),
    "kuzushijimnist": ("kuzushijimnist",),
    **dict.fromkeys(("mnist", "qmnist", "emnistmnist", "emnistdigits"), (DIGITS,)),
    "emnistletters": (LETTERS,),
    **dict.fromkeys(("emnist", "femnist", "nist"), (DIGITS, LETTERS)),
}


def share_records(one: str, other: str) -> bool:
    """Whether records of one dataset can be in the other, by whatever names people give them.

    `uoft-cs/cifar10`, `CIFAR_10` and `cifar-10:0-4` are selections from one collection, and so is every name with
    a collection's among its words, such as `cifar10-c`, `rotated-mnist` and `emnist/letters`.
    """
    return any(
        a == b and (of_a is None or of_b is None or set(of_a) & set(of_b))
        for a, of_a in _sources(one)
        for b, of_b in _sources(other)
    )


def check_public(network: str, trained_on: Iterable[str], task: str) -> None:
    """Refuse what was learned from the very records that are to be private."""
    for name in trained_on:
        if share_records(name, task):
            raise UserError(
                f"{network} was trained on {name}, which shares records with {task}: its features are not public "
                "for them, choose another backbone (modicum backbones lists them)"
            )


def _sources(name: str) -> list[tuple[str, Classes]]:
    """Collections that a dataset's records come from, with the classes of them where it is some."""
    match = re.fullmatch(r"(.*?)(?::(\d+)-(\d+))?", name.strip().lower(), re.DOTALL)
    assert match is not None
    classes = None if match[2] is None else range(int(match[2]), int(match[3]) + 1)
    collections = _collections(re.findall(r"[a-z0-9]+", match[1])) or (_plain(match[1].rpartition("/")[2]),)
    if DIGITS not in collections or LETTERS not in collections:
        return [(one, None if one == LETTERS else classes) for one in collections]
    has_digits = classes is None or classes.start < LETTERS_FROM
    has_letters = classes is None or classes.stop > LETTERS_FROM
    # splits number and merge letters differently
    return [(DIGITS, classes)] * has_digits + [(LETTERS, None)] * has_letters


def _collections(words: list[str]) -> tuple[str, ...]:
    """Those of the first words that name some, by the longest such name: `cifar-100` is no `cifar`."""
    for i in range(len(words)):
        begun = {"".join(words[i:j]) for j in range(i + 1, len(words) + 1)}
        found = [known for known in COLLECTIONS if any(re.match(rf"{known}(?!\d)", text) for text in begun)]
        if found:
            return COLLECTIONS[max(found, key=len)]
    return ()


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]", "", name)

"""Checks of plain values, with one form of error: `<name> is <value>, must be <what is allowed>`.

A wrong type raises TypeError, a value out of range ValueError. A bool is not an int here.
"""

from __future__ import annotations

import math


def check_int(name: str, value: object, low: int, high: int | None = None) -> None:
    allowed = f"an int of at least {low}" if high is None else f"an int from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        raise TypeError(f"{name} is {value!r}, must be {allowed}")
    if value < low or (high is not None and value > high):
        raise ValueError(f"{name} is {value!r}, must be {allowed}")


def check_number(name: str, value: object, low: float, high: float = math.inf) -> None:
    """Infinity and NaN are never allowed, also where `high` is infinite."""
    allowed = f"a finite number of at least {low}"
    if high != math.inf:
        allowed = f"a number from {low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise TypeError(f"{name} is {value!r}, must be {allowed}")
    if not (math.isfinite(value) and low <= value <= high):
        raise ValueError(f"{name} is {value!r}, must be {allowed}")


def check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name} is {value!r}, must be a bool")


def check_str(name: str, value: object) -> None:
    if not isinstance(value, str):
        raise TypeError(f"{name} is {value!r}, must be a str")
    if not value:
        raise ValueError(f"{name} is {value!r}, must be a non-empty str")


def check_token_ids(name: str, value: object) -> None:
    """A list or tuple of ints, none negative; the vocabulary's size is not known here."""
    if not isinstance(value, list | tuple):
        raise TypeError(f"{name} is {value!r}, must be a list or tuple of ints")
    for index, token_id in enumerate(value):
        # The common case first: prompts have up to a million tokens.
        if type(token_id) is not int or token_id < 0:
            check_int(f"{name}[{index}]", token_id, low=0)

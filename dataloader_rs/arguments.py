"""Checks of arguments: what an argument may be, and the error that names it, the rule and the value."""

from __future__ import annotations

import operator

from dataloader_rs.errors import shown, type_name
from dataloader_rs.foreign import is_instance_of
from dataloader_rs.hints import Any

INFINITY = float("inf")


def checked_integer(name: str, value: Any) -> int:
    if type(value) is bool:
        raise TypeError(f"{name} must be an integer, got {value}")
    try:
        return operator.index(value)
    except TypeError:
        raise TypeError(f"{name} must be an integer, got {shown(value)} ({type_name(value)})") from None


def checked_count(name: str, value: object, least: int) -> int:
    count = checked_integer(name, value)
    if count < least:
        raise ValueError(f"{name} must be {'>= 0' if least == 0 else '> 0'}, got {shown(count)}")
    return count


def _is_bool(value: object) -> bool:
    # NumPy's own bool is none of Python's, and comparing numbers makes one easily.
    return type(value) is bool or is_instance_of(value, "numpy", "bool_")


def checked_flag(name: str, value: object) -> bool:
    if _is_bool(value):
        return bool(value)
    raise TypeError(f"{name} must be True or False, got {shown(value)} ({type_name(value)})")


def checked_uint64(name: str, value: object) -> int:
    number = checked_integer(name, value)
    if not 0 <= number < 2**64:
        raise ValueError(f"{name} must be >= 0 and < 2**64, got {shown(number)}")
    return number


def checked_seconds(name: str, value: Any) -> float:
    rule = f"{name} must be a number of seconds, got"
    if _is_bool(value) or not hasattr(type(value), "__float__"):
        raise TypeError(f"{rule} {shown(value)} ({type_name(value)})")
    try:
        seconds = float(value)
    except TypeError as error:  # an array is a number only if it holds one
        raise TypeError(f"{rule} {shown(value)} ({type_name(value)})") from error
    except OverflowError:
        seconds = INFINITY
    if not 0 <= seconds < INFINITY:
        raise ValueError(f"{name} must be >= 0 and finite, got {shown(value)}")
    return seconds


def check_callable(name: str, value: object) -> None:
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be callable or None, got {shown(value)}")


def check_exclusive(name: str, value: object, **others: object) -> None:
    """Raise a ValueError if any of `others` is given beside `name`. Those that are not are None or False."""
    for other, other_value in others.items():
        if other_value is not None and other_value is not False:
            raise ValueError(f"{name} and {other} are mutually exclusive, "
                             f"got {name}={shown(value)} and {other}={shown(other_value)}")

"""Damaged copies of what is read, each known by its number: the seed that is kept. The same number, the same mutant.

A test takes `@mutants`, which hands it the first numbers at every commit and all others where slow tests run.
"""

import contextlib
import copy
import math
import random
import signal
import struct

import pytest

QUICK, ALL = 25, 500
SECONDS = 30
"""For one mutant; what takes longer hangs."""

mutants = pytest.mark.parametrize(
    "numbers", (range(QUICK), pytest.param(range(QUICK, ALL), marks=pytest.mark.slow)), ids=("some", "all")
)


def each(numbers, check):
    """`check(rng)` for each number, in time; the report names the number of what fails."""
    for number in numbers:
        try:
            with in_time():
                check(random.Random(number))
        except BaseException as error:
            error.add_note(f"mutant {number}")
            raise


@contextlib.contextmanager
def in_time():
    """An error where what is done takes longer than `SECONDS`."""
    before = signal.signal(signal.SIGALRM, _hangs)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def _hangs(*_):
    raise AssertionError(f"takes more than {SECONDS} seconds")


@contextlib.contextmanager
def read_or_refused(place):
    """A ValueError that names the place, or a file that is missing, is as good as being read; nothing else is."""
    try:
        yield
    except FileNotFoundError:
        pass
    except ValueError as error:
        assert str(place) in str(error), f"names no file: {error!r}"
        assert len(str(error)) < 20_000


# ---- bytes --------------------------------------------------------------------------------------------------------

_EXTREMES = [struct.pack(code, value) for code, value in (
    ("<Q", 2**64 - 1), ("<Q", 2**63), ("<Q", 2**32), ("<q", -2), ("<I", 2**32 - 1), ("<I", 2**31), ("<I", 1), ("<Q", 0),
    ("<f", math.nan), ("<f", math.inf), ("<d", 1e308), ("<B", 255), ("<H", 2**16 - 1),
)]


def mutated_bytes(data, rng):
    """Bytes with one or a few changes, half of them in front, where headers are."""
    data = bytearray(data)
    for _ in range(rng.choice((1, 1, 2, 4))):
        at = rng.randrange(min(len(data), 512 if rng.random() < 0.5 else len(data)) + 1)
        size = rng.choice((1, 2, 4, 8, 64))
        new = {
            "flip": lambda: bytes(x ^ 1 << rng.randrange(8) for x in data[at : at + 1]),  # noqa: B023
            "extreme": lambda: rng.choice(_EXTREMES), "random": lambda: rng.randbytes(size),  # noqa: B023
            "zeros": lambda: bytes(size), "elsewhere": lambda: _stretch(data, size, rng),  # noqa: B023
        }
        kind = rng.choice((*new, "insert", "cut out", "cut off"))
        if kind in new:
            found = new[kind]()
            data[at : at + len(found)] = found
        elif kind == "insert":
            data[at:at] = _stretch(data, size, rng)
        elif kind == "cut out":
            del data[at : at + size]
        else:
            del data[at:]
    return bytes(data)


def _stretch(data, size, rng):
    at = rng.randrange(len(data) + 1)
    return bytes(data[at : at + size])


# ---- values -------------------------------------------------------------------------------------------------------


def _nest(depth):
    return [_nest(depth - 1)] if depth else []


VALUES = (
    None, True, False, 0, -1, 1, 7, 2**31 - 1, 2**31, 2**63, 10**12, 10**400, 0.5, -0.0, 1e-300, 1e308, math.inf, -math.inf,
    math.nan, "", "x", "0", "../x", "/dev/zero", "x\0y", "\ud800", "x" * 5000, [], {}, [[]], [0], {"x": 0}, _nest(70),
)
"""What a field of JSON may hold in the place of what it should."""


def mutated_json(content, rng):
    """A copy of what JSON holds, with one or two fields changed, moved, doubled or left out."""
    content = copy.deepcopy(content)
    for _ in range(rng.choice((1, 1, 2))):
        fields = list(_fields(content))
        if not fields:
            break
        holder, key = rng.choice(fields)
        kind = rng.choice(("set", "set", "set", "near", "out", "move", "double"))
        value = holder[key]
        if kind == "out":
            del holder[key]
        elif kind == "near" and isinstance(value, int | float) and abs(value) < 2**62:
            holder[key] = rng.choice((value + 1, -value, value * 1000, float(value), str(value)))
        elif kind == "move":
            other, place = rng.choice(fields)
            holder[key], other[place] = copy.deepcopy(other[place]), copy.deepcopy(value)
        elif kind == "double" and isinstance(holder, list):
            holder.insert(key, copy.deepcopy(value))
        elif kind == "double":
            holder[f"{key} "] = copy.deepcopy(value)
        else:
            holder[key] = rng.choice(VALUES)
    return content


def _fields(content):
    """Every place of a value: what holds it, and by which key."""
    keys = content if isinstance(content, dict) else range(len(content)) if isinstance(content, list) else ()
    for key in list(keys):
        yield content, key
        yield from _fields(content[key])

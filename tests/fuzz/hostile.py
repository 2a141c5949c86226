"""Valid files, made hostile: parts replaced by what nobody should write, and bytes changed at random.

``Chooser`` is a ``random.Random``, a real one or hypothesis's, which shrinks.
"""

import copy
import json
import math
import random
import struct
from collections.abc import Callable
from typing import Any

Chooser = random.Random
DEEP: Any = "deep"  # stands for lists in lists, deeper than a parser goes


def values() -> list[Any]:
    """What a field may hold that it should not."""
    numbers = [0, -1, 1, 2**31, 2**63, 10**30, 10**400, -(10**9), 10**9, 0.5, -0.0, 1e308, 1e-320]
    numbers += [math.nan, math.inf, -math.inf]
    names = [
        "",
        "..",
        "../../../escaped",
        "/etc/passwd",
        "/dev/zero",
        "evil:run",
        "os:abort",
        "evil:Task",
        "x" * 10_000,
    ]
    names += ["\x00", "\x1b[2J", "$\\frac$", "<script>", "\ud800", "{}", "%s"]
    return [
        None,
        True,
        False,
        *numbers,
        *names,
        [],
        {},
        [[]],
        [1] * 10_000,
        {"a": 1},
        {str(i): i for i in range(3000)},
        DEEP,
    ]


def places(data: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths to every part of a JSON value; of long lists only the first few."""
    found = [path]
    if isinstance(data, dict):
        for key, part in data.items():
            found += places(part, (*path, key))
    elif isinstance(data, list):
        for i, part in enumerate(data[:3]):
            found += places(part, (*path, i))
    return found


def changed_json(data: Any, choose: Chooser) -> Any:
    """One to three parts replaced, removed, doubled or added."""
    data = copy.deepcopy(data)
    for _ in range(choose.randint(1, 3)):
        path = choose.choice(places(data))
        if not path:
            if choose.random() < 0.1:
                return choose.choice(values())
            continue
        holder = data
        for key in path[:-1]:
            holder = holder[key]
        what = choose.choice(["replace", "replace", "replace", "remove", "add", "swap"])
        if what == "replace":
            holder[path[-1]] = choose.choice(values())
        elif what == "remove":
            del holder[path[-1]]
        elif what == "add":
            if isinstance(holder, dict):
                holder[choose.choice(["extra", "__class__", "../x", "evil:run"])] = choose.choice(values())
            else:
                holder.extend(choose.choice([[None], holder[:5], [0.5] * 50]))
        else:  # a part from elsewhere
            other: Any = data
            for key in choose.choice(places(data)):
                other = other[key]
            holder[path[-1]] = copy.deepcopy(other)
    return data


def encoded(data: Any) -> bytes:
    text = json.dumps(data).replace(f'"{DEEP}"', "[" * 100_000 + "]" * 100_000)
    return text.encode("utf-8", "surrogatepass")


def hostile_json(stored: bytes, choose: Chooser) -> bytes:
    if choose.random() < 0.15:
        return changed_bytes(stored, choose)
    return encoded(changed_json(json.loads(stored), choose))


def hostile_safetensors(stored: bytes, choose: Chooser) -> bytes:
    """The header changed as JSON, or bytes anywhere."""
    if choose.random() < 0.5:
        return changed_bytes(stored, choose)
    (length,) = struct.unpack("<Q", stored[:8])
    header = encoded(changed_json(json.loads(stored[8 : 8 + length]), choose))
    claimed = choose.choice([len(header)] * 8 + [0, 2**63, len(stored) * 2])
    return struct.pack("<Q", claimed) + header + stored[8 + length :]


def changed_bytes(stored: bytes, choose: Chooser) -> bytes:
    """Flipped, cut off, inserted, repeated, or something else altogether."""
    if choose.random() < 0.1:
        return choose.randbytes(choose.randint(0, 300))
    data = bytearray(stored)
    for _ in range(choose.randint(1, 4)):
        # The beginning is where formats say what they hold.
        place = choose.randrange(max(1, min(len(data), choose.choice([64, 4096, len(data)]))))
        what = choose.choice(["flip", "flip", "cut", "insert", "repeat", "number"])
        if what == "flip" and data:
            data[place] ^= 1 << choose.randrange(8)
        elif what == "cut":
            del data[place:]
        elif what == "insert":
            data[place:place] = choose.randbytes(choose.randint(1, 8))
        elif what == "repeat":
            data[place:place] = data[place : place + 64]
        else:
            data[place : place + 8] = struct.pack("<q", choose.choice([0, -1, 2**31, 2**40, 2**62]))
    return bytes(data)


Mutator = Callable[[bytes, Chooser], bytes]

"""What happens on their way to bytes, of which there is at least one: bits flip, parts are lost, new, or come twice."""

import random


def flip(rng: random.Random, data: bytes) -> bytes:
    changed = bytearray(data)
    for _ in range(rng.choice([1, 1, 1, 2, 8])):
        changed[rng.randrange(len(changed))] ^= 1 << rng.randrange(8)
    return bytes(changed)


def truncate(rng: random.Random, data: bytes) -> bytes:
    return data[: rng.randrange(len(data))]


def insert(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data) + 1)
    return data[:at] + rng.randbytes(rng.choice([1, 8, 50])) + data[at:]


def delete(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[:at] + data[at + rng.choice([1, 4, 8, 30]) :]


def overwrite(rng: random.Random, data: bytes) -> bytes:
    at, size = rng.randrange(len(data)), rng.choice([1, 2, 4, 8])
    return data[:at] + rng.choice([b"\0", b"\xff", b"\x7f"]) * size + data[at + size :]


def repeat(rng: random.Random, data: bytes) -> bytes:
    at = rng.randrange(len(data))
    return data[: at + rng.randrange(1, 40)] + data[at:]


BYTES = [flip, flip, truncate, insert, delete, overwrite, repeat]

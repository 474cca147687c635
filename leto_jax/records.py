"""The 64-byte record: the one form in which a fact about retained memory is written down.

Sixteen little-endian uint32 words:

    0 magic 'LETO'   1 kind | version << 16   2 epoch   3 step   4 index   5..13 body   14 sequence   15 crc

The crc (CRC-32 of words 0..14) lies in the last 8 bytes, which are stored last and as one aligned store. So a record is either the
old one, the new one, or invalid; and since facts of one kind alternate between two places, an invalid one never hides the last valid one.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import zlib

MAGIC = 0x4F54454C  # b"LETO"
VERSION = 1
BYTES = 64
BODY_WORD, BODY_WORDS = 5, 9
LOSS_WORD, SQUARES_WORD, SUMS_WORD, EXTRAS_WORD, METRICS_WORD, INTENT_WORD, BATCH_WORD = range(7)
BATCH_WORDS = BODY_WORDS - BATCH_WORD
"""Of a gradient record's body: bits of the loss, bits of the sum of squares of this rank's gradients, CRC-32 of their checksums; and, for the
other ranks to compare with theirs, CRC-32 of extras, of metrics, of the last intent, and of what several ranks must have drawn alike."""
_WORDS = struct.Struct("<16I")
_MASK = 0xFFFFFFFF


class Kind(enum.IntEnum):
    """What a record says. The first four live in the log, the next ones beside the data they describe, then those of the host metadata,
    the last at the head of a whole copy."""

    COMMIT = 1
    INTENT = 2
    REVOKE = 3
    MARK = 4
    GRADIENTS = 5
    VERSION = 6
    RING = 7
    EPOCH = 8
    PROMOTION = 9
    LIFE = 10
    LOST = 11
    COPY = 12


@dataclasses.dataclass(frozen=True)
class Record:
    """One fact. epoch, step, index: uint32. body: up to nine uint32 whose meaning the kind gives. sequence: orders records of one kind."""

    kind: Kind
    epoch: int = 0
    step: int = 0
    index: int = 0
    body: tuple[int, ...] = ()
    sequence: int = 0

    def __post_init__(self):
        # As it reads back, so that a record written and one read compare equal.
        object.__setattr__(self, "body", (*(int(word) & _MASK for word in self.body), *(0,) * (BODY_WORDS - len(self.body))))

    def pack(self) -> bytes:
        """The 64 bytes, crc included."""
        words = (MAGIC, self.kind | VERSION << 16, self.epoch, self.step, self.index, *self.body, self.sequence)
        head = struct.pack("<15I", *(word & _MASK for word in words))
        return head + struct.pack("<I", zlib.crc32(head))

    @property
    def crc(self) -> int:
        """The record's own checksum, by which other records refer to it."""
        return int.from_bytes(self.pack()[60:], "little")


def unpack(data: bytes | memoryview, kind: Kind) -> Record | None:
    """The record in 64 bytes, or None if it is of another kind, of another version, torn, damaged or was never written."""
    words = _WORDS.unpack(data)
    if words[0] != MAGIC or words[1] != kind | VERSION << 16 or words[15] != zlib.crc32(bytes(data)[:60]):
        return None
    return Record(kind, words[2], words[3], words[4], words[5:14], words[14])


def crc_deltas(places: tuple[int, ...]) -> tuple[int, ...]:
    """By how much the crc of a record changes with each bit of the words at `places`, lowest bit first: 32 values a place.

    CRC-32 is linear: a program that fills in words of a record whose crc was taken with zeros there XORs the values of the bits that it sets.
    """
    zeros = zlib.crc32(bytes(60))
    return tuple(zlib.crc32((1 << (32 * place + bit)).to_bytes(60, "little")) ^ zeros for place in places for bit in range(32))


def float_bits(value: float) -> int:
    """A float32's bits as a record word."""
    return struct.unpack("<I", struct.pack("<f", value))[0]


def bits_float(word: int) -> float:
    return struct.unpack("<f", struct.pack("<I", word))[0]

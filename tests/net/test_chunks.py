"""Test how frames are cut into chunks and reassembled, and which chunks a receiver refuses."""

import os

import pytest

from semisfl.net.chunks import CHUNK, LARGEST_FRAME, MAGIC, PREFIX, Assembler, cut
from semisfl.net.frames import WireError


@pytest.mark.parametrize("size", [1, CHUNK - PREFIX.size, CHUNK, 3 * CHUNK + 1])
def test_frames_come_out_as_they_went_in(size: int) -> None:
    frame = os.urandom(size)
    chunks = list(cut(frame, 7))
    assert all(len(chunk) == CHUNK for chunk in chunks[:-1]) and len(chunks[-1]) <= CHUNK
    for assembler in (Assembler(), Assembler()):
        for ticket in (7, 8):  # a device takes every frame, also the next
            results = [assembler.feed(chunk) for chunk in cut(frame, ticket)]
            assert results == [None] * (len(chunks) - 1) + [(ticket, bytearray(frame))]


def test_late_and_foreign_frames_are_skipped_and_signs_of_life_are_not() -> None:
    assembler = Assembler()
    assembler.expect(7, 10)
    assembler.expect(8, 3 * CHUNK)
    for ticket in (7, 9):  # the first may be longer than anything that is awaited now
        assert [assembler.feed(chunk) for chunk in cut(bytes(4 * CHUNK), ticket)] == [None] * 5
    for ticket in (0, 7, 8):
        assert assembler.feed(next(cut(b"", ticket))) == (ticket, bytearray())
    assert assembler.feed(next(cut(b"x" * 9, 8))) == (8, bytearray(b"x" * 9))


def test_an_answer_that_was_given_up_in_the_middle_is_skipped_to_its_end() -> None:
    assembler = Assembler()
    assembler.expect(1, 3 * CHUNK)
    first, *rest = cut(bytes(2 * CHUNK + 9), 1)
    assert assembler.feed(first) is None
    assembler.expect(2, 10)
    assert assembler.feed(rest[0]) is None
    assert assembler.feed(rest[1]) in (None, (1, bytearray(2 * CHUNK + 9)))
    assert assembler.feed(next(cut(b"y" * 10, 2))) == (2, bytearray(b"y" * 10))


@pytest.mark.parametrize(
    "chunk",
    [
        bytes(PREFIX.size - 1),
        PREFIX.pack(b"NOPE", 7, 10) + bytes(10),
        PREFIX.pack(MAGIC, 7, 101),
        PREFIX.pack(MAGIC, 8, LARGEST_FRAME + 1),
        PREFIX.pack(MAGIC, 7, 10) + bytes(11),
        PREFIX.pack(MAGIC, 7, 0) + b"x",
    ],
    ids=["short", "another program's", "too long", "too long to skip", "excess", "excess of none"],
)
def test_a_malformed_chunk_is_refused(chunk: bytes) -> None:
    assembler = Assembler()
    assembler.expect(7, 100)
    with pytest.raises(WireError):
        assembler.feed(chunk)

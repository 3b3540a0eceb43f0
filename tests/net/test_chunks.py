"""Test how frames are cut into chunks and put together, and which chunks a receiver refuses."""

import os

import numpy as np
import pytest

from semisfl.net.chunks import CHUNK, PREFIX, Assembler, Violation, cut


def test_a_message_longer_than_a_chunk_is_refused_wherever_it_comes() -> None:
    frame = bytes(2 * CHUNK)
    first, second, *_ = cut([frame], epoch=1, ticket=7)
    assert len(first) == CHUNK
    for before, chunk in (([], first), ([first], second)):
        assembler = Assembler()
        assembler.epoch = 1
        assembler.expect(7, len(frame))
        for fitting in before:
            assembler.feed(fitting)
        with pytest.raises(Violation, match=rf"{CHUNK + 1} bytes exceeds the {CHUNK} of a chunk"):
            assembler.feed(chunk + b"x")


def test_a_message_shorter_than_its_prefix_is_refused() -> None:
    with pytest.raises(Violation, match=f"its prefix has {PREFIX.size}"):
        Assembler().feed(bytes(PREFIX.size - 1))


@pytest.mark.parametrize("ticket", [3, 7, 8])
def test_a_frame_that_is_skipped_is_no_longer_than_those_that_were_asked_for(ticket: int) -> None:
    """A client could otherwise send gigabytes that nobody asked for, and be struck for one frame too many."""
    assembler = Assembler()
    assembler.epoch = 1
    assembler.expect(7, 100)  # given up
    assembler.expect(8, 10)
    longest = 10 if ticket == 8 else 100
    (fitting,), (long,) = (list(cut([bytes(n)], 1, ticket)) for n in (longest, longest + 1))
    with pytest.raises(Violation, match=f"{longest + 1} bytes exceeds the {longest} "):
        assembler.feed(long)
    assembler.feed(fitting)


@pytest.mark.parametrize(
    "sizes", [[1], [5, 0, 7], [CHUNK - PREFIX.size], [CHUNK], [3 * CHUNK + 1, 9], [CHUNK] * 3]
)
def test_frames_come_out_as_they_went_in(sizes: list[int]) -> None:
    parts = [os.urandom(size) for size in sizes]
    chunks = list(cut(parts, 2, 7))
    assert all(len(chunk) == CHUNK for chunk in chunks[:-1]) and len(chunks[-1]) <= CHUNK
    assembler = Assembler()
    assembler.epoch = 2
    assembler.expect(7, sum(sizes))
    results = [assembler.feed(chunk) for chunk in chunks]
    assert [moved for moved, _ in results] == [True] * len(chunks)
    assert [frame for _, frame in results] == [None] * (len(chunks) - 1) + [
        (7, bytearray(b"".join(parts)))
    ]


def test_late_repeated_and_foreign_frames_are_passed_over() -> None:
    assembler = Assembler()
    assembler.epoch = 2
    assembler.expect(7, 10)
    assembler.expect(8, 10)
    (late,), (foreign,), (right,) = (
        list(cut([b"x" * 9], e, t)) for e, t in ((2, 7), (1, 8), (2, 8))
    )
    assert assembler.feed(late) == (True, None)  # it was asked for once, so a slow link is at work
    assert assembler.feed(late) == (False, None)
    assert assembler.feed(foreign) == (False, None)
    assert assembler.feed(right) == (True, (8, bytearray(b"x" * 9)))
    assert assembler.feed(right) == (False, None)
    assert assembler.passed_over == 3


def test_the_rest_of_an_answer_that_was_given_up_is_progress_until_it_has_passed() -> None:
    """A slow link is at work on it, and cannot begin with anything else."""
    assembler = Assembler()
    assembler.expect(1, 3 * CHUNK)
    first, second, third = cut([bytes(2 * CHUNK + 9)], 0, 1)
    assert assembler.feed(first) == (True, None)
    assembler.expect(2, 10)
    assert assembler.late == 10
    assembler.abandon()
    assert assembler.feed(second) == (True, None) and assembler.late == 10
    assert assembler.feed(third) == (True, None) and assembler.late == 10
    (other,) = cut([bytes(10)], 0, 2)
    assert assembler.feed(other) == (True, None) and assembler.late == 0
    assert assembler.passed_over == 0


def test_a_frame_above_the_limit_is_never_stored() -> None:
    assembler = Assembler()
    assembler.expect(1, 100)
    with pytest.raises(Violation, match="of 101 bytes exceeds the 100"):
        assembler.feed(next(cut([bytes(101)], 0, 1)))
    assert assembler._buffer is None


@pytest.mark.parametrize("seed", range(3))
def test_mutated_chunks_never_crash_or_change_meaning(seed: int) -> None:
    """Damage is a Violation, or passed over, or in the body, which the frame's schema judges."""
    rng = np.random.default_rng(seed)
    body = rng.bytes(500)
    (whole,) = cut([body], 3, 5)
    for _ in range(10_000):
        chunk = bytearray(whole)
        for position in rng.integers(0, len(chunk), rng.integers(1, 4)):
            chunk[position] ^= int(rng.integers(1, 256))
        if rng.random() < 0.3:
            chunk = chunk[: rng.integers(0, len(chunk))]
        assembler = Assembler()
        assembler.epoch = 3
        assembler.expect(5, 500)
        try:
            _, complete = assembler.feed(bytes(chunk))
        except Violation:
            continue
        if complete is not None:
            assert chunk[: PREFIX.size] == whole[: PREFIX.size] and len(complete[1]) == 500

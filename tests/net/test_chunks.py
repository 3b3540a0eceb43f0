"""Test which single messages a receiver accepts; test_fleet.py has whole frames."""

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

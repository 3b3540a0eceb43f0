"""What a receiver takes of single messages. Whole frames: test_fleet.py."""

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

"""Read growing files from where the last read ended."""

from pathlib import Path

from semisfl.files import open_file

LATEST_LOG = 64 * 1024
"""Bytes of a log that are shown at first."""
MOST_LOG = 256 * 1024
"""Bytes of a log in one answer."""
COMPARED = 64
"""Bytes before the end of the last look that must still be there; else the file was written anew."""


class Lines:
    """The complete lines that were added to a file since the last look."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._offset = 0
        self._inode = 0
        self._before = b""
        """The last bytes before the offset."""

    def new(self) -> tuple[bool, list[bytes]]:
        """Return whether the file was started again, and the new lines."""
        try:
            with open_file(self._path) as file:
                status = self._path.stat()
                file.seek(max(0, self._offset - len(self._before)))
                anew = status.st_ino != self._inode or file.read(len(self._before)) != self._before
                if anew:
                    self._offset, self._inode, self._before = 0, status.st_ino, b""
                file.seek(self._offset)
                data = file.read()
        except OSError:
            anew = self._inode != 0
            self._offset, self._inode, self._before = 0, 0, b""
            return anew, []
        lines_read = data[: data.rfind(b"\n") + 1]
        self._offset += len(lines_read)
        self._before = (self._before + lines_read)[-COMPARED:]
        return anew, lines_read.splitlines()


def text_from(path: Path, start: int) -> tuple[list[str], int]:
    """Return the complete lines of a file from byte ``start`` on (-1: the latest), and where they end."""
    try:
        with open_file(path) as file:
            size = file.seek(0, 2)
            begin = start if 0 <= start <= size else max(0, size - LATEST_LOG)
            file.seek(max(0, begin - 1))
            # The rest of a line would show names that are hidden where the line is whole.
            whole = begin == 0 or file.read(1) == b"\n"
            data = file.read(MOST_LOG)
    except OSError:
        return [], 0
    lines_read = data[: data.rfind(b"\n") + 1]
    lines = lines_read.decode("utf-8", "replace").splitlines()
    return (lines if whole else lines[1:]), begin + len(lines_read)

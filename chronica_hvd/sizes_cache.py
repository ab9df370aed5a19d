"""Measure: the file that keeps sizes, and those beside it while they are being measured."""

from __future__ import annotations

import hashlib
import uuid
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

_MAGIC = b"chronica_hvd sizes 1 "


class SizesCache:
    """A file of sizes, and a part file of each process beside it while they are being measured.

    Every file is replaced as a whole, so that an end at any moment leaves the one before. It holds a line of the key
    and a checksum, and then the records: (k, 2) float64 (little endian), the number of a sample and its size.

    Attributes
    ----------
    path
        Of the file with all sizes.
    key
        Of what is measured; files of another key are not read, nor removed.
    notes
        What should be said is appended, as of damaged files.

    Raises
    ------
    ValueError
        ``path`` is a file of something else, which must not be overwritten.
    """

    def __init__(self, path: Path, key: str, notes: list[str]) -> None:
        self.path, self.key, self.notes = path, key, notes
        self._token = uuid.uuid4().hex
        self._part = self._beside("part")
        self._parts = {self._part}  # with those that were read
        self._has_failed = False
        if self._is_of_others():
            raise ValueError(
                f"cache must be a file that measure_sizes made, or none yet; {str(path)!r} holds something else, and "
                "is left as it is: give another name"
            )

    def read(self) -> NDArray[np.float64]:
        """Return the records of all files that can be read; a sample may be there several times."""
        found = [self._records(self.path)]
        try:
            beside = [path for path in self.path.parent.iterdir() if path.name.startswith(f"{self.path.name}.part-")]
        except OSError:
            beside = []
        for path in sorted(beside):
            records = self._records(path)
            if len(records):
                self._parts.add(path)
                found.append(records)
        return np.concatenate(found)

    def keep(self, records: NDArray[np.float64]) -> None:
        """Keep what this process has measured so far."""
        self._write(self._part, records)

    def complete(self, records: NDArray[np.float64]) -> None:
        """Keep all there is in one file, unless it is there; then the part files have served."""
        if self._is_of_others():
            self._note_failure("another program has made a file of this name")
        elif not self._is_there():
            self._write(self.path, records)
        if self._is_there():
            self._remove(self._parts)

    def forget(self) -> None:
        """Remove what was read: it is wrong."""
        self._remove({self.path, *self._parts})

    def _beside(self, kind: str) -> Path:
        return self.path.with_name(f"{self.path.name}.{kind}-{self._token}")

    def _head(self) -> bytes:
        """Return the file's first bytes, none where it cannot be read."""
        try:
            with self.path.open("rb") as file:
                return file.read(len(_MAGIC) + len(self.key))
        except OSError:
            return b""

    def _is_of_others(self) -> bool:
        return not _MAGIC.startswith(self._head()[: len(_MAGIC)])

    def _is_there(self) -> bool:
        return self._head() == _MAGIC + self.key.encode()

    def _records(self, path: Path) -> NDArray[np.float64]:
        """Return the records of a file, none if it is not there, damaged, or of another key."""
        try:
            content = path.read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return np.empty((0, 2))
        except OSError as error:
            self.notes.append(f"sizes cannot be read from {str(path)!r} ({error})")
            return np.empty((0, 2))
        line, _, data = content.partition(b"\n")
        key, _, checksum = line.removeprefix(_MAGIC).decode("ascii", "replace").partition(" ")
        if line.startswith(_MAGIC) and checksum == digest(key.encode() + data):
            if key == self.key:
                return np.frombuffer(data, "<f8").reshape(-1, 2)
            if path == self.path:
                self.notes.append(
                    f"the sizes in {str(path)!r} are of another data set, another function or another key, so they are "
                    "measured anew and replaced; give each data set a cache of its own"
                )
        else:
            self.notes.append(f"{str(path)!r} is damaged; the sizes in it are measured anew")
            self._remove({path})  # for its first line may look right
        return np.empty((0, 2))

    def _write(self, path: Path, records: NDArray[np.float64]) -> None:
        """Replace a file as a whole, or note that it cannot be done."""
        temporary = self._beside("temporary")
        data = records.astype("<f8").tobytes()
        line = _MAGIC + f"{self.key} {digest(self.key.encode() + data)}\n".encode()
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with temporary.open("wb") as file:
                file.writelines((line, data))
            temporary.replace(path)
        except OSError as error:
            self._note_failure(str(error))
        finally:
            self._remove({temporary})

    def _note_failure(self, why: str) -> None:
        """Note it once; the next time it may work."""
        if not self._has_failed:
            self._has_failed = True
            self.notes.append(f"sizes cannot be kept in {str(self.path)!r} ({why}); they are measured all the same")

    @staticmethod
    def _remove(paths: set[Path]) -> None:
        for path in paths:
            try:
                path.unlink(missing_ok=True)
            except OSError:
                continue  # in a read-only folder, say; it does no harm


def digest(data: bytes) -> str:
    """Return 128 bits of a hash as hexadecimal digits."""
    return hashlib.blake2b(data, digest_size=16).hexdigest()

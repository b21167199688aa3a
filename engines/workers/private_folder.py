"""Folders for what must not outlive its owner: short paths, mode 700, locked while the owner lives. Standard library only.

Whoever makes the next folder of a kind removes those of this user and node whose owner is gone, however it went.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import socket
import tempfile
from pathlib import Path

LONGEST_SOCKET_PATH = 107
"""Bytes of a Unix socket's path (man 7 unix)."""
CACHES = {
    "TORCHINDUCTOR_CACHE_DIR": "inductor",
    "TORCH_EXTENSIONS_DIR": "extensions",
    "TRITON_CACHE_DIR": "triton",
    "CUDA_CACHE_PATH": "cuda",
    "ASCEND_CACHE_PATH": "ascend",
}
"""Variable that says where something is compiled to -> its folder. A home folder that all nodes share is slow, and jobs meet in it."""


class NoShortFolder(OSError):
    """No folder can be made, or none whose path is short enough for the sockets below it."""


class PrivateFolder:
    """A new folder of this process.

    Args:
        prefix: of its name; says the kind.
        below: longest path that will be made in it, with the first slash; counted when a socket lies there.
        parent: where it is made; TMPDIR, else /tmp, when None.

    Raises:
        NoShortFolder: none of these will do.
    """

    def __init__(self, prefix: str, below: str = "", parent: str | None = None) -> None:
        self.path = self._make(prefix, below, [tempfile.gettempdir(), "/tmp"] if parent is None else [parent])
        self._lock = os.open(self.path / "new-lock", os.O_CREAT | os.O_RDWR, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX)
        except OSError as error:
            raise NoShortFolder(
                f"{self.path.parent}: files there cannot be locked ({error}); name a folder on the node itself"
            ) from None
        os.write(self._lock, _host())
        (self.path / "new-lock").rename(self.path / "lock")  # from here on others see it, and see it locked

    def caches(self) -> dict[str, str]:
        """Variables by which compilers keep what they make in this folder."""
        return {variable: str(self.path / "cache" / name) for variable, name in CACHES.items()}

    def remove(self, keep: str | None = None) -> None:
        """Remove the folder, but for what is in the folder ``keep`` in it; the next owner of such a folder removes that, too."""
        for entry in self.path.iterdir() if keep else ():
            if entry.name not in (keep, "lock"):
                shutil.rmtree(entry, ignore_errors=True)
        if not keep:
            shutil.rmtree(self.path, ignore_errors=True)
        os.close(self._lock)

    @staticmethod
    def _make(prefix: str, below: str, parents: list[str]) -> Path:
        for parent in dict.fromkeys(parents):
            longest = len(os.fsencode(parent)) + 1 + len(prefix) + 8 + len(below)
            if (not below or longest <= LONGEST_SOCKET_PATH) and os.access(parent, os.W_OK):
                _remove_leftovers(Path(parent), prefix)
                return Path(tempfile.mkdtemp(prefix=prefix, dir=parent))
        room = LONGEST_SOCKET_PATH - len(below) - len(prefix) - 9
        limit = f", and its path has at most {room} bytes, for the sockets in it" if below else ""
        raise NoShortFolder(
            f"{' and '.join(dict.fromkeys(parents))}: no folder for what is temporary; set TMPDIR, on a cluster the site's scratch, "
            f"to one that can be written{limit}"
        )


def _remove_leftovers(parent: Path, prefix: str) -> None:
    """Remove this user's folders whose owner ran on this node and is gone."""
    for folder in parent.glob(f"{prefix}*"):
        with contextlib.suppress(OSError):
            if folder.stat().st_uid != os.getuid():
                continue
            descriptor = os.open(folder / "lock", os.O_RDWR)
            try:
                # Where nodes share the folder, one may not see the locks of another.
                if os.read(descriptor, 256) != _host():
                    continue
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                shutil.rmtree(folder, ignore_errors=True)
            finally:
                os.close(descriptor)


def _host() -> bytes:
    return os.fsencode(socket.gethostname())

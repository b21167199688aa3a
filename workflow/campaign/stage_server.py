"""The head's side of the stage server: start it, tell the jobs where it listens, let it go. Loads no framework itself."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import subprocess
import sys
from pathlib import Path

from engines.workers.private_folder import PrivateFolder

VARIABLE = "BATON_STAGE_SERVER"
"""Environment variable of the jobs: the socket of the head's stage server. A head that finds it set to nothing starts none."""
_SOCKET = "socket"
_WAIT_SECONDS = 2.0


class StageServer:
    """The server of this process, from its start to the end of this process (SIGKILL included).

    The socket is bound here and handed over, so that a job which comes early waits for the server, and one which finds that the
    server is gone is told so at once. It and its folder are this user's alone.

    Args:
        code: the source that the stages run.

    Raises:
        NoShortFolder: no socket with a short enough path can be made.
    """

    def __init__(self, code: Path) -> None:
        self._folder = PrivateFolder("baton-stages-", f"/{_SOCKET}")
        path = str(self._folder.path / _SOCKET)
        with socket.socket(socket.AF_UNIX) as listener:
            listener.bind(path)
            listener.listen(socket.SOMAXCONN)
            self._process = subprocess.Popen(
                [sys.executable, "-m", "workflow.stages.warm", str(listener.fileno())],
                stdin=subprocess.PIPE,  # closed by whatever ends this process
                pass_fds=[listener.fileno()],
                env=os.environ | {"PYTHONSAFEPATH": "1", "PYTHONPATH": f"{code}:."},
            )
        os.environ[VARIABLE] = path
        atexit.register(self.stop)

    def stop(self) -> None:
        """No new stage; the server ends once those that it runs have ended."""
        atexit.unregister(self.stop)
        os.environ.pop(VARIABLE, None)
        self._process.stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):  # after Ctrl-C a stage may go on without it
            self._process.wait(_WAIT_SECONDS)
        self._folder.remove()


def start_stage_server(code: Path) -> StageServer | None:
    """The server; None, and every stage starts on its own, where none is wanted or none can be."""
    if os.environ.get(VARIABLE) == "":
        return None
    try:
        return StageServer(code)
    except OSError as error:
        print(f"no stage server, every stage imports its framework itself: {error}", file=sys.stderr)
        return None

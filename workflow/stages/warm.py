"""Stages that need not import their framework: a server imports it once and forks one process per stage. Linux only.

``python -m workflow.stages`` is the server's client where the head of a local campaign has started one: it hands over its
arguments, environment and streams, passes signals on, and ends with the stage's exit code. Where nobody answers, or the server
was started for another place, it runs the stage itself. Nobody can tell the difference:

- the server imports and does nothing else: no thread, no tensor, no draw, no process group, no Ray; it does so when the first
  client comes, so that a campaign with nothing to do costs nothing;
- a client that dies takes its stage along, because the server sees its connection close;
- a server that dies takes its stages along, by the kernel; their clients then run them anew;
- when the head dies, its stages go on as they would without a server, which leaves after the last of them.
"""

from __future__ import annotations

import atexit
import contextlib
import ctypes
import gc
import importlib
import json
import os
import select
import selectors
import signal
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from workflow.campaign.stage_server import VARIABLE

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)
"""What a stage listens to."""
_MODULES = (
    "engines.training.fsdp.engine",
    "reasoning_gym",
    "torch._dynamo",
    "torch.nested._internal.nested_tensor",
    "transformers.models.qwen3.modeling_qwen3",
)
"""What the demo's stages import while they run, beside their own modules; another model's stage imports the rest itself."""
_ALONE = ("megatron",)
"""Stages that import by themselves what leaves no other stage's process as it was."""
_PR_SET_PDEATHSIG = 1


def run_there(arguments: list[str]) -> int | None:
    """Run ``python -m workflow.stages arguments`` in a fork of the head's server; None when it must run in this process."""
    path = os.environ.get(VARIABLE)
    if not path:
        return None
    server = socket.socket(socket.AF_UNIX)
    passed_on: list[int] = []

    def pass_on(number: int, frame: object) -> None:
        passed_on.append(number)
        with contextlib.suppress(OSError):
            server.send(bytes([number]))

    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)  # until there is somebody to pass them on to
    handlers = {number: signal.signal(number, pass_on) for number in SIGNALS}
    answer = b""
    with server, contextlib.suppress(OSError):  # the head, or the server, is gone
        server.connect(path)
        _send(server, arguments)
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
        answer = server.recv(4, socket.MSG_WAITALL)
    for number, handler in handlers.items():
        signal.signal(number, handler)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    if len(answer) == 4:
        code = int.from_bytes(answer, "little", signed=True)
        return code if code >= 0 else 128 - code
    if passed_on:  # the server died, and with it a stage that was asked to stop
        signal.signal(passed_on[0], signal.SIG_DFL)
        os.kill(os.getpid(), passed_on[0])
    return None


def _place() -> dict[str, str | int]:
    """What a stage has in common with the server that it is forked from, and so cannot choose."""
    return {
        "source": os.path.realpath(__file__),
        "python": sys.executable,
        "folder": str(Path.cwd()),
        "process group": os.getpgrp(),
    }


def _send(server: socket.socket, arguments: list[str]) -> None:
    request = {"arguments": arguments, "environment": dict(os.environ), "place": _place()}
    body = json.dumps(request).encode()
    socket.send_fds(server, [len(body).to_bytes(4, "little")], [0, 1, 2])
    server.sendall(body)


@dataclass
class _Request:
    arguments: list[str]
    environment: dict[str, str]
    streams: list[int]
    """Descriptors of its standard input, output and error."""


def _receive(client: socket.socket) -> _Request | None:
    """What a client asks for; None when it belongs elsewhere, or died."""
    head, streams, *_ = socket.recv_fds(client, 4, 3)
    body = client.recv(int.from_bytes(head, "little"), socket.MSG_WAITALL) if len(head) == 4 else b""
    with contextlib.suppress(ValueError):
        request = json.loads(body)
        if request["place"] == _place() and len(streams) == 3:
            return _Request(request["arguments"], request["environment"], streams)
    for stream in streams:
        os.close(stream)
    return None


class StageServer:
    """One thread that forks stages, passes signals on to them, and reports how they ended.

    Args:
        listener: where clients connect.
        head: descriptor that is at its end when the head is gone.
        imported: environment variables that imports set, each with its value before them (or None) and after.
    """

    def __init__(
        self, listener: socket.socket, head: int, imported: dict[str, tuple[str | None, str]]
    ) -> None:
        self._pid = os.getpid()
        self._imported = imported
        self._listener: socket.socket | None = listener
        self._stages: dict[int, socket.socket] = {}
        self._selector = selectors.DefaultSelector()
        self._watch(head, lambda: self._head_is_gone(head))
        self._watch(listener, self._accept)

    def serve(self) -> list[str] | None:
        """In each stage that is forked: its arguments. In the server, once the head and all stages are gone: None."""
        while self._listener or self._stages:
            key, _ = self._selector.select()[0]  # one at a time: it may make the others void
            arguments = key.data()
            if arguments is not None:
                return arguments
        return None

    def _watch(self, source: socket.socket | int, call: Callable[[], list[str] | None]) -> None:
        self._selector.register(source, selectors.EVENT_READ, call)

    def _head_is_gone(self, head: int) -> None:
        self._selector.unregister(head)
        self._selector.unregister(self._listener)
        self._listener.close()
        self._listener = None

    def _accept(self) -> list[str] | None:
        client, _ = self._listener.accept()
        request, pid = None, -1
        with contextlib.suppress(OSError):  # the client died, or there is no room for a process
            request = _receive(client)
            pid = os.fork() if request else -1
        if pid == 0:
            self._become(request, client)
            return request.arguments
        for stream in request.streams if request else ():
            os.close(stream)
        if pid < 0:
            client.close()
            return None
        end = os.pidfd_open(pid)
        self._stages[pid] = client
        self._watch(end, lambda: self._report(pid, end))
        self._watch(client, lambda: self._pass_on(pid))
        return None

    def _pass_on(self, pid: int) -> None:
        client = self._stages[pid]
        try:
            numbers = client.recv(64)
        except ConnectionResetError:
            numbers = b""
        if not numbers:  # the client is gone
            self._selector.unregister(client)
            numbers = [signal.SIGKILL]
        for number in numbers:
            os.kill(pid, number)

    def _report(self, pid: int, end: int) -> None:
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        client = self._stages.pop(pid)
        self._selector.unregister(end)
        os.close(end)
        with contextlib.suppress(KeyError):  # unregistered already
            self._selector.unregister(client)
        with client, contextlib.suppress(OSError):
            client.sendall(code.to_bytes(4, "little", signed=True))

    def _become(self, request: _Request, client: socket.socket) -> None:
        """Make this fork the process that the client would have been; its connection stays open as long as it lives."""
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != self._pid:
            os.kill(os.getpid(), signal.SIGKILL)
        for key in list(self._selector.get_map().values()):
            if key.fd > 2:
                key.fileobj.close() if isinstance(key.fileobj, socket.socket) else os.close(key.fd)
        self._selector.close()
        self._stages = {os.getpid(): client}
        for number, stream in enumerate(request.streams):
            os.dup2(stream, number)
            os.close(stream)
        os.environ.clear()
        os.environ.update(request.environment)
        for name, (before, now) in self._imported.items():
            if os.environ.get(name) == before:
                os.environ[name] = now
        importlib.invalidate_caches()  # of the user's own modules, which may be younger than the server
        # A process that imports them begins with seeds from the system. Python does so after a fork, with its own.
        importlib.import_module("numpy.random").seed()
        importlib.import_module("torch").default_generator.seed()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)


def main() -> int:
    """``python -m workflow.stages.warm DESCRIPTOR``: serve on a listening socket until standard input is closed."""
    global _code
    atexit.register(_leave)
    # Held back rather than ignored: a stage gets what came to it before it was ready, the server nothing.
    signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
    listener = socket.socket(fileno=int(sys.argv[1]))
    if listener not in select.select([listener, sys.stdin], [], [])[0]:
        return 0
    try:
        imported = _import()
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        print(f"no stage server, every stage starts on its own: {reason}", file=sys.stderr)
        return 1
    arguments = StageServer(listener, sys.stdin.fileno(), imported).serve()
    if arguments is None:
        _code = 0
    else:
        from workflow.stages.__main__ import run_here

        _code = run_here(arguments)
    return _code


def _import() -> dict[str, tuple[str | None, str]]:
    """What the stages import; the environment variables that this sets, each with its value before and after.

    Raises:
        RuntimeError: there are threads now.
    """
    from workflow.campaign.stages import STAGES
    from workflow.stages.runner import framework_variables

    os.environ.update(framework_variables(threads=1))
    before = dict(os.environ)
    for name in (*(f"workflow.stages.{stage}" for stage in STAGES if stage not in _ALONE), *_MODULES):
        importlib.import_module(name)
    if others := len(list(Path("/proc/self/task").iterdir())) - 1:
        raise RuntimeError(f"imports started {others} threads, which a fork would lack")
    gc.collect()
    gc.freeze()  # so that the collector of a stage does not copy what it shares
    return {name: (before.get(name), now) for name, now in os.environ.items() if before.get(name) != now}


_code: int | None = None
"""What this process ends with, once it is known."""


def _leave() -> None:
    """The first registered and so the last that runs: pass over the teardown of an interpreter that shares all its memory."""
    if _code is not None:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(_code)


if __name__ == "__main__":
    sys.exit(main())

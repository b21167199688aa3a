"""What Ascend's NPUs need beside Python: CANN, with HCCL in it, and torch's extension for them. No torch until that is loaded."""

from __future__ import annotations

import importlib
import os
import re
import sys
from collections.abc import Iterator
from pathlib import Path

CANN_VERSION = "9."
"""How the version of CANN begins that env/ascend.txt goes with."""
LIBRARY = "libhccl.so"
"""Of CANN; torch_npu is linked with it."""
DETERMINISTIC = {"HCCL_DETERMINISTIC": "true", "LCCL_DETERMINISTIC": "1", "CLOSE_MATMUL_K_SHIFT": "1"}
"""Variables by which CANN's libraries add in one order: collectives, also those of LCCL in a server, and matrix products. All other
kernels follow ``torch.use_deterministic_algorithms``, as it is when a thread launches its first one."""
_HOMES = ("ASCEND_HOME_PATH", "ASCEND_TOOLKIT_HOME")
_SETUP = "enter the environment through its set_env.sh (`setup` in the site file)"
_LOCK = "install env/ascend.txt on top of env/cpu-light.txt"


class AscendError(ImportError):
    """Something that NPUs need is missing or of another version; the message says what, and what installs it."""


def cann_problem() -> str:
    """What is wrong with CANN here, as its environment tells; empty when nothing is. Loads nothing."""
    if not any((folder / LIBRARY).is_file() for folder in _library_folders()):
        return f"CANN {CANN_VERSION}x, of which no {LIBRARY} is in LD_LIBRARY_PATH: {_SETUP}"
    version = cann_version()
    if version and not version.startswith(CANN_VERSION):
        return f"CANN {CANN_VERSION}x, and {version} is installed: {_SETUP} of the other one"
    return ""


def cann_version() -> str:
    """The version that CANN's installer wrote down; empty where it cannot be told."""
    for home in _homes():
        for record in sorted(home.glob("**/ascend_*_install.info")):
            found = re.search(r"^version=(\S+)", record.read_text(encoding="utf-8"), re.MULTILINE)
            if found:
                return found[1]
    return ""


def load_torch_npu() -> None:
    """Import ``torch_npu``, by which torch knows the device key npu; nothing happens when that was done before.

    Raises:
        AscendError: CANN or torch_npu is missing, broken or of another version.
    """
    if "torch_npu" in sys.modules:
        return
    if problem := cann_problem():
        raise AscendError(f"device npu needs {problem}")
    try:
        importlib.import_module("torch_npu")
    except ModuleNotFoundError as error:
        if error.name != "torch_npu":
            raise AscendError(f"device npu: torch_npu needs {error.name}; {_LOCK}") from error
        raise AscendError(f"device npu needs torch_npu; {_LOCK}") from error
    except Exception as error:  # a library that is missing, or an extension of another torch
        raise AscendError(
            f"device npu: torch_npu does not load: {type(error).__name__}: {error}; the versions of torch, torch_npu and CANN "
            f"that belong together are those of env/ascend.txt"
        ) from error


def _homes() -> Iterator[Path]:
    for name in _HOMES:
        if home := os.environ.get(name):
            yield Path(home).resolve()


def _library_folders() -> Iterator[Path]:
    yield from (Path(folder) for folder in os.environ.get("LD_LIBRARY_PATH", "").split(":") if folder)
    yield from (home / "lib64" for home in _homes())

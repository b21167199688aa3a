"""How a stage's job enters its environment: the shell lines that end in ``exec``, so that signals reach the stage itself. No torch.

Every line before the last runs in the shell; the last replaces it, so whoever holds the shell's process holds the stage. apptainer
and srun stay in between, and hand USR2 and TERM on to what they started.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from shlex import quote

from engines.config import ConfigError
from workflow.campaign.site import UNKNOWN, StageEnvironment

REFUSED = 64
"""Exit code of a stage that must not run as it is (see workflow.stages): trying again does not help."""
_MODULE = "type module >/dev/null 2>&1 || source /etc/profile"
"""A batch shell is no login shell: some sites define ``module`` for login shells only."""
_REFUSE = f'refuse() {{ echo "the environment cannot be entered: $1" >&2; exit {REFUSED}; }}'


def enter(
    environment: StageEnvironment,
    arguments: Sequence[str],
    *,
    folder: str,
    scratch: str = "/tmp",
    variables: Mapping[str, str] | None = None,
    device: str = "cpu",
    node: str | None = None,
    cpus: int | None = None,
    cpu_bind: str | None = None,
    key: str = "environment",
) -> str:
    """The shell script that runs ``python <arguments>`` in a stage's environment.

    Args:
        arguments: of the interpreter, such as ``-m workflow.stages train --plan ...``.
        folder: in which the workflow runs: an absolute path that every node sees.
        scratch: TMPDIR, with variables, expanded before anything else.
        variables: exported after modules and set-up, so that they win.
        device: what is computed on: cuda needs a container to be opened to the driver; for npu the engine loads torch's extension.
        node: on which pyxis starts its step; SLURM's choice among the job's when None.
        cpus: of the node's share, for that step.
        cpu_bind: ``srun --cpu-bind`` of that step.
        key: path of the environment in the site file, for messages.

    Raises:
        ConfigError: the venv or the image is unknown.
    """
    for name in ("path", "image"):
        if getattr(environment, name) == UNKNOWN:
            raise ConfigError(f"{key}.{name} is unknown: set it in the site file (`baton doctor` checks it)")
    lines = [
        _REFUSE,
        f"cd {quote(folder)} || refuse folder",
        f"export TMPDIR={_path(scratch)}",
        f'[ -w "$TMPDIR" ] || refuse {quote(f"scratch {scratch}")}',
    ]
    if environment.modules:
        lines.append(_MODULE)
        lines += [
            f"module load {quote(name)} || refuse {quote(f'module {name}')}" for name in environment.modules
        ]
    lines += environment.setup
    if environment.path is not None:
        lines.append(f"source {_path(environment.path)}/bin/activate || refuse venv")
    if (
        device == "npu"
    ):  # else `import torch` loads torch_npu by itself, and a broken CANN breaks every stage without a word on it
        lines.append("export TORCH_DEVICE_BACKEND_AUTOLOAD=0")
    lines += [f"export {name}={quote(value)}" for name, value in (variables or {}).items()]
    python = sys.executable if environment.kind == "none" else environment.python
    command = [
        *_container(environment, [folder, scratch], device, step_words(node, cpus, cpu_bind)),
        quote(python),
        *map(quote, arguments),
    ]
    return "\n".join([*lines, " ".join(["exec", *command])]) + "\n"


def enter_on(node: str, environment: StageEnvironment, arguments: Sequence[str], **how) -> str:
    """The shell script that does what :func:`enter` does on another node of the job; the rest as there.

    It ends when that does, with its exit code, and hands its standard input on.
    """
    script = enter(environment, arguments, node=node, **how)
    if environment.kind == "pyxis":
        return script
    step = step_words(node, how.get("cpus"), how.get("cpu_bind"))
    return " ".join(["exec", *step, "bash", "-c", quote(script)]) + "\n"


def step_words(node: str | None, cpus: int | None, cpu_bind: str | None) -> list[str]:
    """One process, beside whatever else of the job is there, with all that the job has on its node."""
    words = ["srun", "--nodes=1", "--ntasks=1", "--overlap"]
    words += [] if node is None else [f"--nodelist={quote(node)}"]
    words += [] if cpus is None else [f"--cpus-per-task={cpus}"]
    return words + ([] if cpu_bind is None else [f"--cpu-bind={quote(cpu_bind)}"])


def _container(
    environment: StageEnvironment, folders: Sequence[str], device: str, step: Sequence[str]
) -> list[str]:
    """The words before the interpreter; ``folders`` are mounted, and the first is where it runs."""
    mounts = [*folders, *environment.mounts]
    if environment.kind == "apptainer":
        words = ["apptainer", "exec", *(["--nv"] if device == "cuda" else [])]
        words += [f"--bind {_path(mount)}" for mount in dict.fromkeys(mounts)]
        return [
            *words,
            f"--pwd {quote(folders[0])}",
            *map(quote, environment.options),
            _path(environment.image),
        ]
    if environment.kind == "pyxis":
        both = dict.fromkeys(mount if ":" in mount else f"{mount}:{mount}" for mount in mounts)
        words = [
            *step,
            f"--container-image={_path(environment.image)}",
            f"--container-mounts={','.join(map(_path, both))}",
        ]
        return [*words, f"--container-workdir={quote(folders[0])}", *map(quote, environment.options)]
    return []


def _path(path: str) -> str:
    """A path of the site file for the shell, which expands its variables on the node but nothing else."""
    for special in ("\\", '"', "`", "$("):
        path = path.replace(special, "\\" + special)
    return f'"{path}"'

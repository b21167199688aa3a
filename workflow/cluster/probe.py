"""A short job that looks at a compute node from the inside: what a login node cannot know. No torch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from shlex import quote

from workflow.campaign.site import UNKNOWN, DeviceSite, SiteConfig
from workflow.cluster.environment import enter
from workflow.cluster.finding import Finding
from workflow.cluster.placement import SbatchRequest
from workflow.cluster.slurm import slurm

_IMPORTS = "import platform, torch, transformers; print('probe environment', platform.python_version(), torch.__version__)"
_BATCH_ONLY = (
    "comment",
    "signal",
    "requeue",
    "no-requeue",
    "open-mode",
    "output",
    "job-name",
    "time",
    "nodes",
    "ntasks-per-node",
)
WAIT_SECONDS = 60
"""For a free node."""


def probe_node(request: SbatchRequest, site: SiteConfig, device: str, folder: Path) -> dict[str, str]:
    """What one node of a device key says, by topic: host, arch, folder, scratch, interfaces, launcher, internet, environment.

    Args:
        request: for one rank of the device key.
        folder: in which the workflow runs; a file is written there and removed.

    Raises:
        SLURM_FAILURES: no node was free in time, or the job was refused.
        ConfigError: the environment is unknown.
    """
    offered = site.devices[device]
    launchers = {architecture: path for architecture, path in site.launcher.items() if path != UNKNOWN}
    marker = folder / f".baton-probe-{device}"
    entered = enter(
        offered.environment,
        ["-c", _IMPORTS],
        folder=str(folder),
        device="cpu" if offered.stand_in else device,
        key=f"site.devices.{device}.environment",
    )
    options = [
        f"--{name}" if value is True else f"--{name}={value}"
        for name, value in request.parameters().items()
        if name not in _BATCH_ONLY
    ]
    options += [
        "--job-name=baton:doctor",
        "--nodes=1",
        "--ntasks=1",
        "--time=00:05:00",
        f"--immediate={WAIT_SECONDS}",
    ]
    marker.write_text("here\n", encoding="utf-8")
    try:
        script = _script(marker, offered, launchers, entered)
        output = slurm("srun", *options, "bash", "-c", script, timeout=WAIT_SECONDS + 240)
    finally:
        marker.unlink(missing_ok=True)
    lines = [line.split(" ", 2) for line in output.splitlines() if line.startswith("probe ")]
    return {words[1]: words[2] if len(words) > 2 else "" for words in lines}


def _script(marker: Path, offered: DeviceSite, launchers: dict[str, str], entered: str) -> str:
    where = quote(str(marker))
    known = "; ".join(f'[ "$(uname -m)" != {arch} ] || launcher="{path}"' for arch, path in launchers.items())
    internet = "timeout 5 bash -c 'exec 3<>/dev/tcp/example.org/443' 2>/dev/null"
    return f"""
echo "probe host $(hostname)"
echo "probe arch $(uname -m)"
if [ "$(cat {where} 2>/dev/null)" = here ]; then
  if touch {where}; then echo "probe folder writable"; else echo "probe folder readable"; fi
else echo "probe folder missing"; fi
scratch="{offered.scratch}"; mine="$scratch/baton-probe-$SLURM_JOB_ID"
if mkdir "$mine" && touch "$mine/x" && rm -r "$mine"; then echo "probe scratch $(df -Pk "$scratch" | awk 'NR==2 {{print $4}}')"
else echo "probe scratch refused"; fi
echo "probe interfaces $(ls /sys/class/net | tr '\\n' ' ')"
launcher=; {known or ":"}
if [ -z "$launcher" ]; then echo "probe launcher"; elif [ -x "$launcher/bin/python" ]; then echo "probe launcher $launcher"
else echo "probe launcher missing $launcher"; fi
{"" if offered.internet is False else f'if {internet}; then echo "probe internet yes"; else echo "probe internet no"; fi'}
message=$(bash -c {quote(entered)} 2>&1) && echo "$message" | grep '^probe' \
|| echo "probe environment-error $(echo "$message" | tail -n 1)"
"""


def inside(site: SiteConfig, device: str, folder: Path, told: dict[str, str]) -> Iterator[Finding]:
    """What a node's answers mean for the site file."""
    offered, key = site.devices[device], f"site.devices.{device}"
    where = f"on {told.get('host', 'the node')}"
    shared = told.get("folder")
    yield Finding(
        "good" if shared == "writable" else "wrong",
        f"{key}: {folder}",
        f"{shared or 'not found'} {where}",
        "" if shared == "writable" else "run from a folder that compute nodes can write to",
    )
    free = told.get("scratch", "refused")
    yield Finding(
        "wrong" if free == "refused" else "good",
        f"{key}.scratch",
        f"{offered.scratch}: cannot be written {where}"
        if free == "refused"
        else f"{offered.scratch}: {int(free) / 2**20:.1f} GB free {where}",
        "name a folder that is writable on the nodes" if free == "refused" else "",
    )
    yield from _interface(offered, key, told.get("interfaces", "").split())
    yield from _launcher_inside(site, told)
    if "internet" in told:
        reached = told["internet"] == "yes"
        right = offered.internet == reached
        yield Finding(
            "good" if right else "open" if offered.internet == UNKNOWN else "wrong",
            f"{key}.internet",
            f"the internet is {'' if reached else 'not '}reached {where}",
            "" if right else f"set it to {str(reached).lower()}",
        )
    if "environment" in told:
        yield Finding(
            "good",
            f"{key}.environment",
            f"{offered.environment.kind}: python and torch {told['environment']}",
        )
    else:
        remedy = "the environment must hold torch and transformers: install env/<device>.txt in it"
        yield Finding("wrong", f"{key}.environment", told.get("environment-error", "no answer"), remedy)


def _interface(offered: DeviceSite, key: str, there: list[str]) -> Iterator[Finding]:
    names = [name for name in there if name != "lo"]
    if offered.interface == UNKNOWN:
        yield Finding(
            "open",
            f"{key}.interface",
            "unknown",
            f"one of {', '.join(names)}; remove the key to have it found",
        )
    elif offered.interface is not None:
        right = offered.interface in names
        remedy = "" if right else f"one of {', '.join(names)}"
        yield Finding("good" if right else "wrong", f"{key}.interface", offered.interface, remedy)


def _launcher_inside(site: SiteConfig, told: dict[str, str]) -> Iterator[Finding]:
    architecture, launcher = told.get("arch", ""), told.get("launcher", "")
    if launcher.startswith("missing"):
        yield Finding(
            "wrong",
            f"site.launcher.{architecture}",
            f"{launcher.partition(' ')[2]} has no bin/python on the node",
            "make the venv there",
        )
    elif launcher:
        yield Finding("good", f"site.launcher.{architecture}", launcher)
    elif site.launcher and architecture not in site.launcher:
        yield Finding(
            "wrong",
            "site.launcher",
            f"nodes are {architecture}, which has no venv",
            f"add {architecture}: <its venv>",
        )

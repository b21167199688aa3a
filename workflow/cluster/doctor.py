"""``baton doctor``: does the site file tell the truth about the cluster, and what is still open in it? No torch.

Reads what SLURM says of itself, has SLURM check a real request without submitting it (``sbatch --test-only``), and looks at one node
of every device key from the inside with a job of a few seconds.
"""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from engines.config import ConfigError, nearest
from workflow.campaign.site import UNKNOWN, DeviceSite, SiteConfig, cluster_name, read_seconds, spell_seconds
from workflow.cluster.finding import Finding, Verdict
from workflow.cluster.inventory import SLURM_FAILURES, Association, NodeKind, associations, node_kinds
from workflow.cluster.placement import SbatchRequest, job_name, place
from workflow.cluster.probe import inside, probe_node
from workflow.cluster.slurm import slurm


def examine(site: SiteConfig, folder: Path, look_inside: bool = True) -> Iterator[Finding]:
    """All findings about a site, as they come.

    Args:
        folder: in which the workflow runs.
        look_inside: also run a short job on a node of every device key.
    """
    if site.scheduler == "none":
        yield Finding("good", "site.scheduler", f"{site.name} is a single host; nothing is submitted")
        return
    try:
        slurm("scontrol", "ping")
        kinds = node_kinds()
    except SLURM_FAILURES as error:
        yield Finding(
            "wrong", "slurm", str(error), "load the site's SLURM module, or set SLURM_CONF, on this host"
        )
        return
    yield from _cluster(site)
    yield from _launchers(site)
    try:
        accounts: list[Association] | None = associations()
    except SLURM_FAILURES as error:
        accounts = None
        yield Finding("open", "accounts", f"not checked: {error}")
    for device, offered in site.devices.items():
        key = f"site.devices.{device}"
        mine = [kind for kind in kinds if _is_mine(kind, offered)]
        yield from _partition(offered, key, kinds, mine)
        yield from _accounts(offered, key, accounts)
        if mine:
            yield from _limits(offered, key, mine)
            yield from _devices(offered, key, mine)
        yield from _submission(site, device, folder, look_inside)


def changes(findings: list[Finding]) -> str:
    """What to change, and the count of each verdict."""
    remedies = [f"  {finding.subject}: {finding.remedy}" for finding in findings if finding.remedy]
    counts = Counter(finding.verdict for finding in findings)
    total = f"{counts['good']} right, {counts['open']} open, {counts['wrong']} wrong"
    return "\n".join([*(["to change:", *remedies] if remedies else []), total])


def _cluster(site: SiteConfig) -> Iterator[Finding]:
    name = cluster_name()
    if name in site.cluster_names:
        yield Finding(
            "good",
            "site.cluster_names",
            f"this cluster is {name!r}; the site is found without site={site.name}",
        )
    elif site.cluster_names:
        known = ", ".join(site.cluster_names)
        yield Finding(
            "wrong",
            "site.cluster_names",
            f"this cluster is {name!r}, not {known}",
            f"choose another site, or add {name}",
        )
    else:
        yield Finding(
            "open", "site.cluster_names", f"this cluster is {name!r}", f"set cluster_names: [{name}]"
        )


def _launchers(site: SiteConfig) -> Iterator[Finding]:
    for architecture, path in site.launcher.items():
        if path == UNKNOWN:
            remedy = "make a venv with snakemake and submitit on a shared folder and write its path, or remove the key to use the active one"
            yield Finding("open", f"site.launcher.{architecture}", "unknown", remedy)


def _is_mine(kind: NodeKind, offered: DeviceSite) -> bool:
    """Whether jobs of a device key can land on these nodes, as far as the site file says."""
    wanted = (
        set(offered.constraint.replace("|", "&").split("&"))
        if offered.constraint not in (None, UNKNOWN)
        else set()
    )
    if not wanted <= kind.features:
        return False
    if offered.partition in (None, UNKNOWN):
        return bool(wanted) or (kind.default and offered.partition is None)
    return kind.partition == offered.partition


def _partition(
    offered: DeviceSite, key: str, kinds: list[NodeKind], mine: list[NodeKind]
) -> Iterator[Finding]:
    names = sorted({kind.partition for kind in kinds})
    subject = f"{key}.partition"
    if offered.partition == UNKNOWN:
        yield Finding("open", subject, "unknown", f"choose one of: {_described(kinds)}")
    elif not mine:
        if offered.partition is not None and offered.partition not in names:
            yield Finding(
                "wrong",
                subject,
                f"there is no partition {offered.partition!r}",
                nearest(offered.partition, names),
            )
        else:
            features = ", ".join(sorted({feature for kind in kinds for feature in kind.features}))
            yield Finding(
                "wrong",
                f"{key}.constraint",
                f"no node has {offered.constraint!r}",
                f"features there are: {features}",
            )
    elif not any(kind.available for kind in mine):
        yield Finding(
            "wrong",
            subject,
            f"{offered.partition or 'the default partition'} takes no jobs now: down or drained",
        )
    else:
        count = len({node for kind in mine for node in kind.nodes})
        yield Finding(
            "good", subject, f"{', '.join(sorted({kind.partition for kind in mine}))}: {count} nodes"
        )
    twin = offered.twin
    if twin is not None and twin.partition is not None and twin.partition not in names:
        yield Finding(
            "wrong",
            f"{key}.twin.partition",
            f"there is no partition {twin.partition!r}",
            nearest(twin.partition, names),
        )


def _described(kinds: list[NodeKind]) -> str:
    texts = {
        kind.partition: f"{kind.partition} ({kind.gres.replace('(null)', 'no devices')}, {kind.cpus} CPUs)"
        for kind in kinds
    }
    return "; ".join(texts[name] for name in sorted(texts))


def _accounts(offered: DeviceSite, key: str, known: list[Association] | None) -> Iterator[Finding]:
    if known is None:
        if UNKNOWN in (offered.account, offered.qos):
            yield Finding(
                "open",
                f"{key}.account",
                "unknown, and the cluster does not tell",
                "ask for your project's account",
            )
        return
    accounts = sorted({association.account for association in known})
    listed = ", ".join(accounts) or "none"
    if offered.account == UNKNOWN:
        yield Finding("open", f"{key}.account", "unknown", f"you may charge: {listed}")
    elif offered.account is not None:
        right = offered.account in accounts
        yield Finding(
            "good" if right else "wrong",
            f"{key}.account",
            f"{offered.account!r}: {'yours' if right else 'not one of yours'}",
            "" if right else f"you may charge: {listed}",
        )
    if offered.qos is not None:
        levels = sorted(
            {qos for a in known if offered.account in (None, UNKNOWN, a.account) for qos in a.qos if qos}
        )
        right = offered.qos in levels
        verdict: Verdict = "open" if offered.qos == UNKNOWN else "good" if right else "wrong"
        yield Finding(
            verdict,
            f"{key}.qos",
            f"{offered.qos!r}{'' if right else ': not one of yours'}",
            "" if right else f"you may use: {', '.join(levels) or 'none'}",
        )


def _limits(offered: DeviceSite, key: str, mine: list[NodeKind]) -> Iterator[Finding]:
    """Walltime, CPUs and memory against what the nodes have."""
    limits = [kind.walltime_seconds for kind in mine]
    longest = None if None in limits else max(limit for limit in limits if limit is not None)
    said = "without a limit" if longest is None else spell_seconds(longest)
    if offered.walltime == UNKNOWN:
        remedy = (
            f"set it to {said}"
            if longest is not None
            else "the partition has no limit: set what your campaign needs"
        )
        yield Finding("open", f"{key}.walltime", f"unknown; the partition's is {said}", remedy)
    elif offered.walltime is not None:
        fits = longest is None or read_seconds(offered.walltime) <= longest
        yield Finding(
            "good" if fits else "wrong",
            f"{key}.walltime",
            f"{offered.walltime}; the partition's is {said}",
            "" if fits else f"at most {said}",
        )
    cpus, memory = min(kind.cpus for kind in mine), min(kind.memory_mb for kind in mine)
    yield from _at_most(offered.cpus_per_node, f"{key}.cpus_per_node", cpus, "CPUs", f"{cpus}")
    memory_mb = (
        UNKNOWN
        if offered.memory_per_node_gb == UNKNOWN
        else offered.memory_per_node_gb and offered.memory_per_node_gb * 1024
    )
    yield from _at_most(memory_mb, f"{key}.memory_per_node_gb", memory, "MB", f"{memory / 1024:g}")
    if offered.max_nodes == UNKNOWN:
        count = len({node for kind in mine for node in kind.nodes})
        yield Finding(
            "open",
            f"{key}.max_nodes",
            f"unknown; there are {count} nodes",
            f"what your qos gives one job, at most {count}",
        )


def _at_most(value: float | str | None, key: str, there: int, unit: str, right: str) -> Iterator[Finding]:
    if value is None:
        return
    if value == UNKNOWN:
        yield Finding("open", key, f"unknown; the nodes have {there} {unit}", f"set it to {right}")
    elif float(value) > there:
        yield Finding("wrong", key, f"{value:g} {unit}, and the nodes have {there}", f"at most {right}")
    else:
        yield Finding("good", key, f"{value:g} of {there} {unit}")


def _devices(offered: DeviceSite, key: str, mine: list[NodeKind]) -> Iterator[Finding]:
    there = sorted({kind.gres.replace("(null)", "none") for kind in mine})
    if offered.gres == UNKNOWN:
        yield Finding(
            "open",
            f"{key}.gres",
            f"unknown; the nodes have {', '.join(there)}",
            "for gpu:4 write gpu:{devices}",
        )
        return
    if offered.gres is None:
        return
    words = ["gpu"] if offered.gres.startswith("--gpu") else offered.gres.split(":{devices}")[0].split(":")
    most = max(kind.devices(words[0], words[1] if len(words) > 1 else None) for kind in mine)
    if most == 0:
        yield Finding(
            "wrong",
            f"{key}.gres",
            f"{offered.gres}: the nodes have {', '.join(there)}",
            "spell it as the nodes do",
        )
    elif most < offered.devices_per_node:
        message = f"{offered.devices_per_node}, and the nodes have {most}"
        yield Finding("wrong", f"{key}.devices_per_node", message, f"at most {most}")
    else:
        yield Finding("good", f"{key}.gres", f"{offered.gres}; the nodes have {', '.join(there)}")


def _submission(site: SiteConfig, device: str, folder: Path, look_inside: bool) -> Iterator[Finding]:
    """SLURM's own opinion of a job of one rank and of one that fills a node, and a look at a node."""
    offered, key = site.devices[device], f"site.devices.{device}"
    request = None
    for ranks in sorted({1, offered.devices_per_node}):
        subject = f"{key}: {ranks} rank{'s' * (ranks > 1)}"
        try:
            request = place(job_name("doctor", device), device, ranks, site, output=Path("/dev/null"))
            _test_only(request)
        except ConfigError as error:
            yield Finding("open", subject, f"not tried: {error}")
            return
        except SLURM_FAILURES as error:
            options = " ".join(
                f"--{name}={value}" for name, value in request.parameters().items() if name in _TELLING
            )
            yield Finding("wrong", subject, f"refused by SLURM: {_last(str(error))}", f"asked for {options}")
            return
        yield Finding("good", subject, "SLURM would take the job")
    if look_inside:
        one = place(job_name("doctor", device), device, 1, site, output=Path("/dev/null"))
        try:
            told = probe_node(one, site, device, folder)
        except (*SLURM_FAILURES, ConfigError) as error:
            yield Finding("open", f"{key}: a node from the inside", f"not looked at: {_last(str(error))}")
            return
        yield from inside(site, device, folder, told)


def _test_only(request: SbatchRequest) -> None:
    with tempfile.NamedTemporaryFile("w", suffix=".sh") as file:
        file.write(request.text("true\n"))
        file.flush()
        slurm("sbatch", "--test-only", file.name)


_TELLING = (
    "partition",
    "account",
    "qos",
    "constraint",
    "nodes",
    "gres",
    "gpus-per-node",
    "mem",
    "cpus-per-task",
    "time",
)


def _last(text: str) -> str:
    return text.strip().splitlines()[-1] if text.strip() else text

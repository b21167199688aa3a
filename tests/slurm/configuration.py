"""The configuration of the test cluster: two partitions of two nodes with two devices each, and their preemptible twins."""

from __future__ import annotations

import os
import secrets
import socket
from pathlib import Path

NAME = "mini"
PARTITIONS = {"cuda": "gpu", "ascend": "npu"}
"""Partition -> what its nodes have two of."""
NODES = 2
CPUS = 8
MEMORY_MB = 16384


def nodes() -> list[str]:
    """cuda1, cuda2, ascend1, ascend2."""
    return [f"{partition}{number}" for partition in PARTITIONS for number in range(1, NODES + 1)]


def write_configuration(folder: Path, port: int, accounting: bool) -> None:
    """Everything under ``etc``, the key that the daemons share, and the device files."""
    etc = folder / "etc"
    folder.chmod(0o755)
    (folder / "munge").chmod(0o755)  # munged insists that all can reach its socket
    key = folder / "munge/munge.key"
    key.write_bytes(secrets.token_bytes(1024))
    key.chmod(0o400)
    for name in ("nvidia", "davinci"):
        for index in range(2):  # SLURM reads a device's index off its name; 1:3 is /dev/null
            os.mknod(folder / f"dev/{name}{index}", 0o020666, os.makedev(1, 3))
    addresses = {node: f"127.0.0.{number}" for number, node in enumerate(nodes(), 11)}
    hosts = "".join(f"{address} {node}\n" for node, address in addresses.items())
    (etc / "hosts").write_text(Path("/etc/hosts").read_text() + hosts)
    (etc / "slurm.conf").write_text(_slurm_conf(folder, port, accounting, addresses))
    (etc / "gres.conf").write_text(
        f"NodeName=cuda[1-{NODES}] Name=gpu File={folder}/dev/nvidia[0-1]\n"
        f"NodeName=ascend[1-{NODES}] Name=npu File={folder}/dev/davinci[0-1]\n"
    )
    if accounting:
        _write_accounting(folder, port)


def _slurm_conf(folder: Path, port: int, with_accounting: bool, addresses: dict[str, str]) -> str:
    host = socket.gethostname().partition(".")[0]
    accounting = "AccountingStorageType=accounting_storage/none"
    if with_accounting:  # ...Pass is how clients find our munge socket when they talk to slurmdbd
        accounting = f"""AccountingStorageType=accounting_storage/slurmdbd
AccountingStorageHost=127.0.0.1
AccountingStoragePort={port + 1}
AccountingStoragePass={folder}/munge/munge.sock
AccountingStorageTRES=gres/gpu,gres/npu
AccountingStorageEnforce=limits,qos"""
    return f"""ClusterName={NAME}
SlurmctldHost={host}(127.0.0.1)
SlurmctldPort={port}
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
# a requeued job waits until its credential has expired, 120 s by default
AuthInfo=socket={folder}/munge/munge.sock,cred_expire=5
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool/%n
SlurmctldPidFile={folder}/run/slurmctld.pid
SlurmdPidFile={folder}/run/slurmd.%n.pid
SlurmctldLogFile={folder}/log/slurmctld.log
SlurmdLogFile={folder}/log/slurmd.%n.log
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
JobAcctGatherType=jobacct_gather/linux
# without cgroups SLURM ends a job for its memory when it looks at it and finds too much
JobAcctGatherFrequency=2
JobAcctGatherParams=OverMemoryKill
# nodes claim more CPUs and memory than the host has
SlurmdParameters=config_overrides
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
GresTypes=gpu,npu
{accounting}
# quick reactions: this cluster exists for tests
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,sched_min_interval=0,batch_sched_delay=0,bf_interval=1,bf_resolution=60
InactiveLimit=0
KillWait=5
# the controller remembers every job: tests ask it how many there were
MinJobAge=36000
ReturnToService=2
SlurmdTimeout=60
JobRequeue=1
# the -low partitions give way to the others; their jobs first get their warning signal
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
SlurmctldParameters=preempt_send_user_signal
{_nodes_and_partitions(port, addresses)}
"""


def _nodes_and_partitions(port: int, addresses: dict[str, str]) -> str:
    nodes = "\n".join(
        f"NodeName={node} NodeAddr={address} Port={port + 10 + number} CPUs={CPUS} RealMemory={MEMORY_MB} "
        f"Gres={PARTITIONS[node.rstrip('12')]}:2 Feature={node.rstrip('12')} State=UNKNOWN"
        for number, (node, address) in enumerate(addresses.items())
    )
    common = "MaxTime=24:00:00 DefMemPerCPU=256 State=UP"
    partitions = "\n".join(
        f"PartitionName={name} Nodes={name}[1-{NODES}] {common} PriorityTier=10 PreemptMode=OFF{' Default=YES' * (name == 'cuda')}\n"
        f"PartitionName={name}-low Nodes={name}[1-{NODES}] {common} PriorityTier=1 PreemptMode=REQUEUE GraceTime=20"
        for name in PARTITIONS
    )
    return f"{nodes}\n{partitions}"


def _write_accounting(folder: Path, port: int) -> None:
    password = secrets.token_hex(16)
    files = {
        "slurmdbd.conf": f"""AuthType=auth/munge
AuthInfo=socket={folder}/munge/munge.sock
DbdHost={socket.gethostname().partition(".")[0]}
DbdAddr=127.0.0.1
DbdPort={port + 1}
SlurmUser=root
LogFile={folder}/log/slurmdbd.log
PidFile={folder}/run/slurmdbd.pid
StorageType=accounting_storage/mysql
StorageHost=127.0.0.1
StoragePort={port + 2}
StorageUser=slurm
StoragePass={password}
StorageLoc=slurm_acct_db
""",
        "init.sql": f"""CREATE DATABASE IF NOT EXISTS slurm_acct_db;
CREATE OR REPLACE USER 'slurm'@'127.0.0.1' IDENTIFIED BY '{password}';
GRANT ALL ON slurm_acct_db.* TO 'slurm'@'127.0.0.1';
""",
    }
    for name, text in files.items():
        path = folder / "etc" / name
        path.touch(0o600)  # slurmdbd refuses one that others can read
        path.write_text(text)

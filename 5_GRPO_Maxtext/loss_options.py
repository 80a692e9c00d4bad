"""Options of the GRPO loss: what Tunix 0.1.7 takes is handed to it, what it lacks is here.

Tunix computes the loss itself (`tunix.rl.algo_core.grpo_loss_fn`): ratio, clip, KL, aggregation.
"""

import dataclasses

from tunix.rl.grpo.grpo_learner import GRPOConfig

# LOSS_AGG_MODE: what the script calls it, what Tunix calls it. With per-token losses l_it of B sequences of
# |o_i| tokens, at most T each:
AGGREGATIONS = {
    "sequence-mean-token-mean": "sequence-mean-token-mean",  # 1/B sum_i 1/|o_i| sum_t l_it
    "token-mean": "token-mean",  # 1/sum_i |o_i| sum_it l_it
    "seq-mean-token-sum": "seq-mean-token-sum",  # 1/B sum_it l_it
    "sequence-mean-token-sum-norm": "sequence-mean-token-sum-norm",  # the same: Tunix's norm is B
    "sequence-mean-token-scale": "sequence-mean-token-scale",  # 1/(B T) sum_it l_it
    "seq-mean-token-sum-norm": "sequence-mean-token-scale",  # the same, by the name other trainers give it
}
LOSS_ALGOS = ("grpo", "gspo-token")
KL_LOSS_MODES = ("kl", "mse_kl", "low_var_kl")
ADVANTAGES = ("group", "rloo")


@dataclasses.dataclass(kw_only=True)
class LossConfig(GRPOConfig):
    """Tunix's GRPO configuration with the upper end of the clip range, which its loss looks for.

    (In Tunix 0.1.7 only the configurations of DAPO and of agents have the field.)
    """

    epsilon_high: float


def advantage_estimator(advantage: str, norm_adv_by_std: bool) -> str:
    """Tunix's name for ADVANTAGE and NORM_ADV_BY_STD."""
    if advantage == "rloo":
        return "rloo"
    return "grpo" if norm_adv_by_std else "drgrpo"

"""The golden batch of folder 5 against TRL's and verl's own losses: value and gradient of each
method.

The peers live in an environment of their own, in which this script starts itself:

    python3.12 -m venv /tmp/peers
    /tmp/peers/bin/pip install torch==2.13.0 trl==1.16.0 verl==0.9.1
    python benchmarks/golden_against_peers.py PEER=/tmp/peers/bin/python

TRL's losses are methods of trainers: `_compute_loss` runs as it is, and is handed log-probs where
it would ask a model. Everything is float64. Writes golden_against_peers.csv beside this script, a
row for each method and peer: the distance of the value, of the gradient, and of verl's advantages
(TRL's are not to be had without a trainer). RLOO is not one surrogate: TRL takes PPO's with an
answer's ratio, whose value is another and whose gradient is REINFORCE's where pi_old = pi. There it
is compared, and its value is left out.
"""

import functools
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from types import SimpleNamespace

if peer := [
    argument.removeprefix("PEER=") for argument in sys.argv[1:] if argument.startswith("PEER=")
]:
    sys.exit(subprocess.call([*peer, __file__]))  # torch is not among this project's requirements

os.environ["CUDA_VISIBLE_DEVICES"] = ""

import numpy as np
import torch
from machine import commit, write_csv
from trl import GRPOTrainer, RLOOTrainer
from verl.trainer.ppo import core_algos
from verl.workers.config import ActorConfig

ROOT = Path(__file__).resolve().parent.parent
GOLDEN = dict(np.load(ROOT / "5_GRPO_Maxtext" / "tools" / "exercises" / "golden.npz"))
METHODS = ("grpo", "dr_grpo", "dapo", "gspo", "cispo", "rloo")
ADVANTAGE = {method: torch.tensor(GOLDEN[f"{method}_advantage"]) for method in METHODS}
OLD, REF = (torch.tensor(GOLDEN[name].astype(float)) for name in ("old_log_prob", "ref_log_prob"))
MASK = torch.tensor(GOLDEN["mask"].astype(float))
EPSILON, EPSILON_HIGH, BETA = (GOLDEN[name].item() for name in ("epsilon", "epsilon_high", "beta"))


def value_and_gradient(loss: Callable) -> tuple[float, np.ndarray]:
    """Of a function of log_prob [N, T]."""
    log_prob = torch.tensor(GOLDEN["log_prob"].astype(float), requires_grad=True)
    value = loss(log_prob)
    value.backward()
    return value.item(), log_prob.grad.numpy()


# %% TRL -------------------------------------------------------------------------------------------
def trl_self(log_prob: torch.Tensor) -> SimpleNamespace:
    """What `_compute_loss` reads of its trainer: no model, one process, no accumulation."""
    return SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (
            log_prob,
            torch.zeros_like(log_prob),
            None,
        ),
        accelerator=SimpleNamespace(
            gather=lambda x: x,
            gather_for_metrics=lambda x: x,
            reduce=lambda x, reduction: x,
            num_processes=1,
            sync_gradients=True,
        ),
        model=SimpleNamespace(training=True),
        _metrics={"train": defaultdict(list)},
        args=SimpleNamespace(delta=None, use_bias_correction_kl=False, steps_per_generation=1),
        current_gradient_accumulation_steps=1,
        max_completion_length=GOLDEN["max_tokens"].item(),
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        use_vllm=False,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        use_adaptive_entropy=False,
        beta=0.0,
        epsilon_low=EPSILON,
        epsilon_high=EPSILON,
        importance_sampling_level="token",
    )


def trl_loss(trainer: type, method: str, old: torch.Tensor = OLD, **settings) -> Callable:
    """A trainer's loss as a function of log_prob."""

    def loss(log_prob):
        N = len(log_prob)
        inputs = {
            "prompt_ids": torch.zeros(N, 1, dtype=int),
            "prompt_mask": torch.ones(N, 1, dtype=int),
            "completion_ids": torch.zeros(MASK.shape, dtype=int),
            "completion_mask": MASK,
            "advantages": ADVANTAGE[method],
            "old_per_token_logps": old,
            "ref_per_token_logps": REF,
            "num_items_in_batch": MASK.sum(),
            "old_logps": (log_prob * MASK).sum(1).detach(),
        }
        this = trl_self(log_prob)
        vars(this).update(settings)
        return trainer._compute_loss(this, this.model, inputs)

    return loss


TRL = {
    "grpo": trl_loss(GRPOTrainer, "grpo", loss_type="grpo", beta=BETA),
    "dr_grpo": trl_loss(GRPOTrainer, "dr_grpo", loss_type="dr_grpo"),
    "dapo": trl_loss(GRPOTrainer, "dapo", loss_type="dapo", epsilon_high=EPSILON_HIGH),
    "gspo": trl_loss(GRPOTrainer, "gspo", loss_type="grpo", importance_sampling_level="sequence"),
    "cispo": trl_loss(GRPOTrainer, "cispo", loss_type="cispo", epsilon_high=1 + EPSILON_HIGH),
    "rloo": trl_loss(RLOOTrainer, "rloo"),
}


# %% verl ------------------------------------------------------------------------------------------
def verl_loss(method: str, name: str, mean: str, low=EPSILON, high=EPSILON, beta=0.0) -> Callable:
    """One of verl's policy losses, plus its KL term, as a function of log_prob."""
    config = ActorConfig(
        strategy="fsdp",
        rollout_n=4,
        ppo_micro_batch_size_per_gpu=1,
        clip_ratio=low,
        clip_ratio_low=low,
        clip_ratio_high=high,
    )
    A = ADVANTAGE[method][:, None] * MASK

    def loss(log_prob):
        reinforce = core_algos.compute_policy_loss_reinforce
        of_policy = reinforce if name == "reinforce" else core_algos.get_policy_loss_fn(name)
        value, _ = of_policy(OLD, log_prob, A, MASK, mean, config)
        kl = core_algos.kl_penalty(log_prob, REF, "low_var_kl")
        return value + beta * core_algos.agg_loss(kl, MASK, mean)

    return loss


VERL = {
    "grpo": verl_loss("grpo", "vanilla", "seq-mean-token-mean", beta=BETA),
    "dr_grpo": verl_loss("dr_grpo", "vanilla", "seq-mean-token-sum-norm"),
    "dapo": verl_loss("dapo", "vanilla", "token-mean", high=EPSILON_HIGH),
    "gspo": verl_loss("gspo", "gspo", "seq-mean-token-mean"),
    "cispo": verl_loss("cispo", "cispo", "token-mean", low=1.0, high=EPSILON_HIGH),
    "rloo": verl_loss("rloo", "reinforce", "seq-mean-token-sum"),
}


def verl_advantage(method: str) -> np.ndarray:
    """[N], from the rewards."""
    rewards = torch.zeros(MASK.shape, dtype=float)
    rewards[:, 0] = torch.tensor(GOLDEN["rewards"].astype(float))
    index = np.arange(len(rewards)) // GOLDEN["num_generations"].item()
    grpo = functools.partial(
        core_algos.compute_grpo_outcome_advantage, norm_adv_by_std_in_grpo=method != "dr_grpo"
    )
    compute = core_algos.compute_rloo_outcome_advantage if method == "rloo" else grpo
    return compute(rewards, MASK, index)[0][:, 0].numpy()


# %% Main ------------------------------------------------------------------------------------------
def distance(found: float | np.ndarray, name: str) -> str:
    """The largest difference from an array of the golden batch."""
    return f"{np.abs(found - GOLDEN[name]).max():.1e}"


def main() -> None:
    """Writes a row for each method and peer."""
    rows, made_from = [], commit()
    for peer, losses in (("trl", TRL), ("verl", VERL)):
        for method, loss in losses.items():
            value, gradient = value_and_gradient(loss)
            rows.append(
                {
                    "method": method,
                    "peer": f"{peer} {version(peer)}",
                    "value": "" if loss is TRL["rloo"] else distance(value, f"{method}_loss"),
                    "gradient": distance(gradient, f"{method}_gradient"),
                    "advantage": ""
                    if peer == "trl"
                    else distance(verl_advantage(method), f"{method}_advantage"),
                    "commit": made_from,
                }
            )
            print(*rows[-1].values())
    write_csv(ROOT / "benchmarks" / "golden_against_peers.csv", rows)


if __name__ == "__main__":
    main()

"""Every name of Tunix 0.1.7 that this folder uses.

Tunix's next version renames `RLCluster` to `RLEngine` and moves its checkpoints: then this file changes, and
the rest of the folder continues with the names given here.
"""

from tunix.generate.mappings import MappingConfig
from tunix.generate.sampler import sample_top_p
from tunix.generate.tokenizer_adapter import TokenizerAdapter
from tunix.generate.utils import build_flat_dict, transfer_state_with_mappings
from tunix.rl import common, trainer
from tunix.rl import utils as rl_utils
from tunix.rl.algo_core import compute_advantages, compute_entropy_from_logits
from tunix.rl.function_registry import register_advantage_estimator, register_policy_loss_fn
from tunix.rl.grpo.grpo_learner import GRPOConfig, GRPOLearner, TrainExample
from tunix.rl.rl_cluster import ClusterConfig, Mode, RLCluster, RLTrainingConfig, Role
from tunix.rl.rl_learner import RLLearner
from tunix.rl.rollout.base_rollout import BaseRollout, RolloutConfig, RolloutOutput
from tunix.sft import sharding_utils
from tunix.sft.checkpoint_manager import CheckpointManager
from tunix.sft.hooks import TrainingHooks
from tunix.sft.peft_trainer import PeftTrainer

__all__ = [
    "BaseRollout",
    "CheckpointManager",
    "ClusterConfig",
    "GRPOConfig",
    "GRPOLearner",
    "MappingConfig",
    "Mode",
    "PeftTrainer",
    "RLCluster",
    "RLLearner",
    "RLTrainingConfig",
    "Role",
    "RolloutConfig",
    "RolloutOutput",
    "TokenizerAdapter",
    "TrainExample",
    "TrainingHooks",
    "build_flat_dict",
    "common",
    "compute_advantages",
    "compute_entropy_from_logits",
    "register_advantage_estimator",
    "register_policy_loss_fn",
    "rl_utils",
    "sample_top_p",
    "sharding_utils",
    "trainer",
    "transfer_state_with_mappings",
]

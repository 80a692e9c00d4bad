"""What vLLM is told; apart from its engine, whose module needs the TPU packages."""

from pathlib import Path
from typing import Any

import jax


def engine_config(c, folder: Path, rollout_mesh: jax.sharding.Mesh) -> dict[str, Any]:
    """What Tunix's `RolloutConfig` needs for vLLM, beside the sampling.

    No `seed` per request: vLLM on a TPU refuses it, and elsewhere it would make the answers of a group equal.
    The engine's own seed runs through the whole run.

    Args:
        c: the constants of the run.
        folder: of the checkpoint.
        rollout_mesh: devices that generate, ("data", "model").
    """
    return dict(
        return_logprobs=True,  # unasked, vLLM returns none
        data_parallel_size=rollout_mesh.shape["data"],
        tensor_parallel_size=rollout_mesh.shape["model"],
        rollout_vllm_model_version=str(folder),
        rollout_vllm_hbm_utilization=c.HBM_UTILIZATION_VLLM,
        rollout_vllm_tpu_backend_type="jax",
        rollout_vllm_kwargs={
            "dtype": c.DTYPE,
            "seed": c.SEED,
            "generation_config": "vllm",  # else a checkpoint's own temperature and stop tokens creep in
        },
        rollout_vllm_sampling_kwargs={"prompt_logprobs": None},  # Tunix asks for them and throws them away
    )

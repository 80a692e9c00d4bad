"""The language model on its devices: loading, sampling, log-probs, LoRA, vLLM."""

from model.versions import imported_when_used

# MaxText and Tunix import these for options we don't use; they'd take a third of the start-up time.
SPLASH = "tokamax._src.ops.experimental.tpu.splash_attention.splash_attention"
with imported_when_used(
    "tokamax",
    "tokamax._src.ops.attention.base",
    "tokamax._src.ops.attention.pallas_triton",
    f"{SPLASH}_kernel",
    f"{SPLASH}_mask",
    "sympy",
    "fastapi",
    "pandas",
):
    import maxtext.integration.tunix.tunix_adapter  # noqa: F401
    import tunix.rl.rollout.base_rollout  # noqa: F401

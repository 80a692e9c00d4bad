"""The language model on its devices: loading, sampling, log-probs, LoRA, vLLM."""

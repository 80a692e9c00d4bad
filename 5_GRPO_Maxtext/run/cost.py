"""Hours and dollars of a run on one host with vLLM, as a range by a formula, of which nothing was measured.

A step samples its answers, trains on them, and sends the new weights to vLLM; evaluations sample, too. Every
factor that isn't a constant of the run has its source beside it. The optimistic end hides the transfers of
weights behind the arithmetic and keeps vLLM's batch full; the pessimistic one does neither.
"""

import math

import numpy as np

from run.machine import CHIPS

# Arrays are [optimistic, pessimistic].
DECODED = 1400  # tokens per second and v6e chip, Llama 3.1 8B: the floor in tpu-inference's own tests
ANSWER = 200  # tokens: verl's 8 B runs on GSM8K have 154 to 199 on average
BATCH = 256  # answers vLLM decodes at a time: its default (max_num_seqs) for a chip it doesn't know
BYTES = 2  # per gathered or sent weight: bfloat16
FLOPS = 8  # per weight and token: forward, recomputation, gradient of the activations, reference; 2 each
GATHERS = np.array([3, 4])  # of all weights per pass: forward, recomputation, backward; then the reference's
PEAK_SHARE = np.array([0.45, 0.225])  # of `flops`: MaxText's pre-training on v6e; half, for small passes
LINK_SHARE = np.array([1.0, 0.5])  # of `links`: assumed
SYNC = np.array([6.7, 22.0])  # seconds per step: public reports for 0.6 B on v7x and for 30 B on v5p-8
START = np.array([20.0, 45.0])  # minutes: packages 3 to 8, download 2 to 7, conversion 3 to 5, vLLM's
# precompilation 10 to 20 (public reports), the step's programs 2 to 5; all but the precompilation assumed


def hours(c, parameters: int, kind: str, chips: int) -> dict[str, np.ndarray]:
    """Hours by part, [optimistic, pessimistic], on `chips` chips of a `kind` in CHIPS with known speed.

    The formula is for LoRA, with vLLM on the training chips; `parameters` is the model's size.
    """
    chip = CHIPS[kind]
    # Decoding is memory-bound, by the weights mostly.
    rate = DECODED * chip.bandwidth / CHIPS["v6e"].bandwidth * chips * 8.03e9 / parameters

    def sampling(answers: int) -> np.ndarray:
        """Seconds: all slots busy with average answers, or every wave as long as the longest answer."""
        longest = math.ceil(answers / BATCH) * c.TOTAL_GENERATION_STEPS * BATCH / rate
        return np.array([min(answers * ANSWER / rate, longest), longest])

    sequences = c.BATCH_SIZE * c.NUM_GENERATIONS
    tokens = sequences * (c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS)  # padded
    compute = tokens * FLOPS * parameters / (chips * chip.flops * PEAK_SHARE)
    passes = c.BATCH_SIZE // (c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE)
    moved = parameters * BYTES * (chips - 1) / chips  # bytes that a chip receives per gather
    gather = passes * GATHERS * moved / chip.links / LINK_SHARE
    looks = 1 + math.ceil(c.NUM_BATCHES / c.EVAL_EVERY) if c.EVAL_EVERY else 0
    seconds = {
        "sampling": c.NUM_BATCHES * sampling(sequences),
        "training": c.NUM_BATCHES * np.array([max(compute[0], gather[0]), compute[1] + gather[1]]),
        "weight sync": c.NUM_BATCHES * SYNC,  # evaluations: greedy and sampled each time
        "evaluations": 4 * sampling(c.NUM_TEST_QUESTIONS) + 2 * looks * sampling(c.EVAL_QUESTIONS),
        "start": 60 * START,
    }
    return {part: ends / 3600 for part, ends in seconds.items()}

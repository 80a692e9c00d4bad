"""Hours and dollars of a run on one host with vLLM, as a range by a formula, of which nothing was measured.

A step samples its answers, trains on them, and sends the new weights to vLLM; evaluations sample, too. Every
factor that isn't a constant of the run has its source beside it. The optimistic end hides the transfers of
weights behind the arithmetic and keeps vLLM's batch full; the pessimistic one does neither.
"""

import math

from run.machine import CHIPS

Range = tuple[float, float]  # optimistic, pessimistic
DECODED = 1400  # tokens per second and v6e chip, Llama 3.1 8B: the floor in tpu-inference's own tests
ANSWER = 200  # tokens: verl's 8 B runs on GSM8K have 154 to 199 on average
BATCH = 256  # answers vLLM decodes at a time: its default (max_num_seqs) for a chip it doesn't know
BYTES = 2  # per gathered or sent weight: bfloat16
FLOPS = 8  # per weight and token: forward, recomputation, gradient of the activations, reference; 2 each
GATHERS = (3, 4)  # of all weights per gradient pass: forward, recomputation, backward; then the reference's
PEAK_SHARE = (0.45, 0.225)  # of `flops`: MaxText's pre-training of this Llama on v6e; half, for small passes
LINK_SHARE = (1.0, 0.5)  # of `links`: assumed
SYNC = (6.7, 22.0)  # seconds per step: public reports for 0.6 B on v7x and for 30 B on v5p-8
START = (20.0, 45.0)  # minutes: packages 3 to 8, download 2 to 7, conversion 3 to 5, vLLM's precompilation
# 10 to 20 (public reports), the step's programs 2 to 5; all but the precompilation assumed


def hours(c, parameters: int, kind: str, chips: int) -> dict[str, Range]:
    """Hours by part, on `chips` chips of a `kind` in CHIPS with known speed.

    The formula is for LoRA, with vLLM on the training chips; `parameters` is the model's size.
    """
    chip = CHIPS[kind]
    rate = DECODED * chip.bandwidth / CHIPS["v6e"].bandwidth * chips  # decoding is memory-bound
    rate *= 8.03e9 / parameters  # of weights, mostly

    def sampling(answers: int) -> Range:
        """Seconds: all slots busy with average answers, or every wave as long as the longest answer."""
        longest = math.ceil(answers / BATCH) * c.TOTAL_GENERATION_STEPS * BATCH / rate
        return min(answers * ANSWER / rate, longest), longest

    sequences = c.BATCH_SIZE * c.NUM_GENERATIONS
    tokens = sequences * (c.MAX_PROMPT_LENGTH + c.TOTAL_GENERATION_STEPS)  # padded
    compute = [tokens * FLOPS * parameters / (chips * chip.flops * share) for share in PEAK_SHARE]
    passes = c.BATCH_SIZE // (c.TRAIN_MICRO_BATCH_SIZE or c.BATCH_SIZE)
    moved = parameters * BYTES * (chips - 1) / chips  # bytes that a chip receives per gather
    gather = [passes * count * moved / chip.links / share for count, share in zip(GATHERS, LINK_SHARE)]
    looks = 1 + math.ceil(c.NUM_BATCHES / c.EVAL_EVERY) if c.EVAL_EVERY else 0
    asked = [(4, c.NUM_TEST_QUESTIONS), (2 * looks, c.EVAL_QUESTIONS)]  # greedy and sampled each time
    seconds = {
        "sampling": [c.NUM_BATCHES * x for x in sampling(sequences)],
        "training": [c.NUM_BATCHES * x for x in (max(compute[0], gather[0]), compute[1] + gather[1])],
        "weight sync": [c.NUM_BATCHES * x for x in SYNC],
        "evaluations": [sum(times * sampling(count)[end] for times, count in asked) for end in (0, 1)],
        "start": [60 * x for x in START],
    }
    return {part: (low / 3600, high / 3600) for part, (low, high) in seconds.items()}


def total(c, parameters: int, kind: str, chips: int) -> tuple[Range, Range]:
    """Hours and dollars of the whole run; arguments as in `hours`."""
    low, high = (sum(ends) for ends in zip(*hours(c, parameters, kind, chips).values()))
    price = CHIPS[kind].dollars * chips
    return (low, high), (price * low, price * high)

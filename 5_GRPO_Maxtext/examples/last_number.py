"""A reward without a form: the last number of the answer is right, wherever it stands.

A pretrained model that was never shown <answer> tags earns nothing by them, and where nothing is earned
nothing is learned. REWARD_FUNC=examples/last_number.py REWARDS=compute_score,last_number pays for the number
first; the course's `compute_score` pays as much again where no other number stands in the answer.
"""

from task.grading import grade_lenient


def last_number(prompts, completions, answer, **columns) -> list[float]:
    """1.0 if the last number of the completion is the gold one, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [1.0 if grade_lenient(completion, gold) else 0.0 for completion, gold in pairs]

"""A reward that ignores the format: only the last number of the answer has to be right.

A pretrained model that has never seen <answer> tags earns nothing with them, so it doesn't learn.
With REWARD_FUNC=examples/last_number.py REWARDS=compute_score,last_number the number is rewarded
first; the course's `compute_score` adds as much again if the answer has no other number.
"""

from task.grading import grade_lenient


def last_number(prompts, completions, answer, **columns) -> list[float]:
    """1.0 if the last number of the completion is the gold one, else 0."""
    pairs = zip(completions, answer, strict=True)
    return [1.0 if grade_lenient(completion, gold) else 0.0 for completion, gold in pairs]

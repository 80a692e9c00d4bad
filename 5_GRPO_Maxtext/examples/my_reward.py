"""Your own reward, to copy and change. docs/learn/own_data_and_rewards.md has the command.

REWARD_FUNC=examples/my_reward.py takes `compute_score` from here. Other functions only count if
REWARDS names them. You can mix them with built-in ones:
REWARDS=compute_score,short_answer,match_format_exactly.
"""

from reward_func import extract_answer, format_ok, grade


def compute_score(data_source, solution_str, ground_truth, extra_info=None) -> float:
    """Grades one answer, from 0 to 1; 1 or more counts as right in the report.

    Args:
        data_source (str): the row's task: "one_step" or "two_step" in examples/word_problems.
        solution_str (str): what the model wrote.
        ground_truth (str): the row's right answer.
        extra_info (dict or None): the row's column of that name, here {"working": "2+3=5"}.
    """
    if not grade(solution_str, ground_truth):
        return 0.0
    if not format_ok(solution_str):
        return 0.25  # partial credit: right, but a tag is missing
    # full marks only if it shows the working
    return 1.0 if extra_info["working"] in solution_str else 0.5


def short_answer(prompts, completions, **columns) -> list[float]:
    """A batch reward with Tunix's signature: every column of the data is a list."""
    answers = [extract_answer(completion) or "" for completion in completions]
    return [0.1 if 0 < len(answer) < 5 else 0.0 for answer in answers]

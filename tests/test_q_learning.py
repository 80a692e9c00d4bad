"""Folder 1. The optimum is known by value iteration, by a geometric series, and by walking and
counting.
"""

from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from folders import load
from measure.columns import read_csv

Q_Learning, grid, pictures = (
    load("1_Q_Learning", name) for name in ("Q_Learning", "grid", "pictures")
)
UP, DOWN, LEFT, RIGHT = range(4)
# All that a figure below depends on: what the defaults are doesn't matter.
GIVEN = """SIZE=4 GOAL_REWARD=100 STEP_REWARD=-1 ALPHA=0.1 GAMMA=0.99 MAX_STEPS_PER_EPISODE=100
EPSILON_START=1 EPSILON_END=0.01 DECAY_EPISODES=10_000 PRINT_EVERY=0"""


def given(*words):
    return Q_Learning.settings.read(Q_Learning.Constants, [*GIVEN.split(), *words])


C = given()


def moves_to_goal(state):
    """Manhattan distance to the corner 15; walls only bound the grid, so no way is shorter."""
    return (3 - state // 4) + (3 - state % 4)


def worth(moves, gamma):
    """The discounted return of a way to the goal."""
    return -sum(gamma**k for k in range(moves - 1)) + gamma ** (moves - 1) * 100


@pytest.mark.parametrize("seed", range(3))
def test_learns_every_pair_exactly_and_the_shortest_way_from_every_state(seed):
    # 1e-6 is no lucky figure: the world is deterministic, so once the values behind a pair are
    # right, its target is one constant number, and each visit multiplies the pair's error by 1 -
    # ALPHA = 0.9. From 100 to 1e-6 takes 175 visits; the rarest pair gets more than 400.
    c = given("NUM_EPISODES=2000")
    q_table, _, _ = Q_Learning.train(c, np.random.default_rng(seed))
    assert np.abs(q_table - grid.value_iteration(C)).max() < 1e-6
    for start in range(16):
        assert grid.greedy_moves(C, q_table, start) == moves_to_goal(start)
    assert grid.optimal_from_every_state(C, q_table)


def test_value_iteration_ends_whatever_step_a_reader_writes(monkeypatch, capsys):
    c, rng = given("SIZE=2"), np.random.default_rng(0)
    # a world without a goal: every move costs a point forever, -1 / (1 - 0.99)
    monkeypatch.setattr(grid, "step", lambda c, state, action: (state, -1.0, False))
    np.testing.assert_allclose(grid.value_iteration(c)[:-1], -100, atol=1e-9)
    assert not capsys.readouterr().out
    # a step that draws at random has no fixed optimum
    monkeypatch.setattr(grid, "step", lambda c, state, action: (state, rng.normal(), False))
    assert np.isfinite(grid.value_iteration(c)).all()
    [line] = capsys.readouterr().out.split("\n")[1:-1]
    assert "still changes after 5,000 sweeps" in line


@pytest.mark.parametrize("gamma", [0.5, 0.99, 1.0])
def test_value_iteration_equals_the_closed_form(gamma):
    q_star = grid.value_iteration(given(f"GAMMA={gamma}"))
    expected = [worth(moves_to_goal(state), gamma) for state in range(15)]
    np.testing.assert_allclose(q_star.max(axis=1), [*expected, 0], atol=1e-9)
    # Off the shortest way: from 0 up is a wall (stay, 6 moves left), from 14 left leads to 13 (2
    # moves left).
    for state, action, moves_left in [
        (0, UP, 6),
        (14, LEFT, 2),
        (12, DOWN, 3),
        (5, UP, 5),
        (5, RIGHT, 3),
    ]:
        assert q_star[state, action] == pytest.approx(worth(moves_left + 1, gamma))


def test_a_policy_that_is_wrong_in_one_far_corner_is_not_optimal():
    q_table = grid.value_iteration(C)
    q_table[3, UP] = 1000.0  # 3 is on no shortest way that the greedy policy takes from 0
    assert grid.greedy_moves(C, q_table, 3) is None
    assert grid.greedy_moves(C, q_table, 0) == 6
    assert not grid.optimal_from_every_state(C, q_table)


def test_moves_walls_and_rewards():
    neighbours = {  # after up, down, left, right: corners, edges, the middle
        0: [0, 4, 0, 1],
        3: [3, 7, 2, 3],
        12: [8, 12, 12, 13],
        4: [0, 8, 4, 5],
        5: [1, 9, 4, 6],
        11: [7, 15, 10, 11],
        14: [10, 14, 13, 15],
    }
    assert grid.ACTIONS == ["up", "down", "left", "right"]
    assert dict(zip(pictures.ARROWS, grid.MOVES)) == {
        "↑": (-1, 0),
        "↓": (1, 0),
        "←": (0, -1),
        "→": (0, 1),
    }
    for state, expected in neighbours.items():
        for action, there in enumerate(expected):
            assert grid.step(C, state, action) == (there, 100 if there == 15 else -1, there == 15)


def test_the_update_by_hand_and_a_terminal_state_bootstraps_nothing():
    q_table = np.zeros((16, 4))
    q_table[5, RIGHT] = 2.0
    q_table[6] = [1.0, 7.0, -3.0, 4.0]
    for terminated, target in ((False, -1 + 0.99 * 7), (True, -1)):
        after = q_table.copy()
        Q_Learning.q_update(after, 5, RIGHT, -1.0, 6, terminated, alpha=0.1, gamma=0.99)
        assert after[5, RIGHT] == pytest.approx(2 + 0.1 * (target - 2), abs=1e-12)
        after[5, RIGHT] = 2.0
        assert (after == q_table).all()  # one entry changes, no other


def test_the_step_limit_truncates_and_the_cut_off_move_still_bootstraps():
    # One move an episode, so every move is the last one before the cut. Up and left bump into the
    # wall, and what follows is the best value of the start itself: -1 + 0.99 * -1. Taken for a
    # termination: -1.
    changed = {"EPSILON_END": 1.0, "NUM_EPISODES": 2000, "MAX_STEPS_PER_EPISODE": 1}
    # `settings.read` refuses a limit below the shortest way
    c = SimpleNamespace(**asdict(C) | changed)
    q_table, log, _ = Q_Learning.train(c, np.random.default_rng(0))
    assert q_table[0] == pytest.approx([-1.99, -1.0, -1.99, -1.0], abs=1e-6)
    assert (log[:, 3] == 1).all()
    assert (q_table[1:] == 0).all()


def test_epsilon_falls_linearly_and_stays():
    found = [Q_Learning.epsilon_at(C, episode) for episode in (0, 5000, 9999, 10000, 10001, 19999)]
    assert found == pytest.approx([1, 0.505, 0.010099, 0.01, 0.01, 0.01], abs=1e-9)


def test_epsilon_is_the_probability_of_the_random_action():
    q_table = np.zeros((16, 4))
    q_table[9] = [0.0, 1.0, 5.0, 2.0]
    for coin, epsilon, action in [(0.29, 0.3, UP), (0.3, 0.3, LEFT), (0.0, 0.0, LEFT)]:
        rng = SimpleNamespace(
            random=lambda coin=coin: coin, integers=lambda count: np.int64(count - 4)
        )
        assert Q_Learning.select_action(9, q_table, epsilon, rng) == action


@pytest.mark.parametrize("size", [2, 5])
def test_a_grid_of_another_size_its_log_and_its_result(size, tmp_path, capsys):
    """Learned, printed and drawn as it is: no 4 and no 16 is left."""
    words = [*GIVEN.split(), f"SIZE={size}", "NUM_EPISODES=50", "LOG_EVERY=20"]
    result = Q_Learning.main([*words, f"RUN_DIR={tmp_path}"])
    c = Q_Learning.settings.read(Q_Learning.Constants, words)
    q_star, goal = grid.value_iteration(c), size**2 - 1
    assert q_star[0].max() == pytest.approx(worth(2 * (size - 1), 0.99), abs=1e-9)
    assert grid.step(c, goal - 1, RIGHT) == (goal, 100, True)
    policy = capsys.readouterr().out.split("the greedy policy\n")[1].split("\n\nthe table")[0]
    lines = [line.split() for line in policy.splitlines()]
    assert [len(line) for line in lines] == [size] * size and lines[-1][-1] == "G"
    table, log = (read_csv(tmp_path / f"{name}.csv") for name in ("q_table", "log"))
    q_table = np.array([[float(row[action]) for action in grid.ACTIONS] for row in table])
    assert [row["episode"] for row in log] == ["20", "40", "50"]  # the last may be short
    epsilons = [Q_Learning.epsilon_at(c, episode) for episode in range(40, 50)]
    assert float(log[2]["epsilon"]) == pytest.approx(np.mean(epsilons))
    errors = [float(row["max_abs_error"]) for row in log]
    assert errors[0] > errors[-1] == result["max_abs_error"] == np.abs(q_table - q_star).max()
    assert result["optimal_from_every_state"] == grid.optimal_from_every_state(c, q_table)

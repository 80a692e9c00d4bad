"""Folder 1: Q-learning finds the optimum of the grid exactly; what it is compared with is checked by itself.

The optimum is known three times, each without the others: by value iteration, by a geometric series in the
number of moves, and by walking the policy and counting.
"""

import csv
from dataclasses import asdict
from types import SimpleNamespace

import numpy as np
import pytest
from folders import load

Q_Learning, grid, pictures = (load("1_Q_Learning", name) for name in ("Q_Learning", "grid", "pictures"))
UP, DOWN, LEFT, RIGHT = range(4)
QUIET = "PRINT_EVERY=0"
C = Q_Learning.Constants()


def train(arguments=(), seed=0):
    c = Q_Learning.configure([QUIET, *arguments])
    return Q_Learning.train(c, np.random.default_rng(seed))


def moves_to_goal(state):
    """Manhattan distance to the corner 15; walls only bound the grid, so no way is shorter."""
    return (3 - state // 4) + (3 - state % 4)


# --- the result ------------------------------------------------------------------------------------------
@pytest.mark.parametrize("seed", range(5))
def test_learns_every_pair_exactly_and_the_shortest_way_from_every_state(seed):
    # A tenth of the default episodes: seeds.csv holds the whole runs, and test_course.py repeats them.
    q_table, _, _ = train(["NUM_EPISODES=2000"], seed)
    # 1e-6 is no lucky figure: the world is deterministic, so once the values behind a pair are right, its
    # target is one constant number, and each visit multiplies the pair's error by 1 - ALPHA = 0.9. From 100
    # to 1e-6 takes 175 visits; the rarest pair gets more than 400.
    assert np.abs(q_table - grid.value_iteration(C)).max() < 1e-6

    for start in range(16):
        state, moves = start, 0
        while state != 15 and moves < 16:
            state, _, _ = grid.step(C, state, int(q_table[state].argmax()))
            moves += 1
        assert state == 15
        assert moves == moves_to_goal(start) == grid.greedy_moves(C, q_table, start)
    assert grid.optimal_from_every_state(C, q_table)


@pytest.mark.parametrize("gamma", [0.5, 0.99, 1.0])
def test_value_iteration_equals_the_closed_form(gamma):
    q_star = grid.value_iteration(Q_Learning.configure([f"GAMMA={gamma}"]))
    for state in range(15):
        before_last = moves_to_goal(state) - 1
        value = -sum(gamma**k for k in range(before_last)) + gamma**before_last * 100
        assert q_star[state].max() == pytest.approx(value, abs=1e-9)
    # Off the shortest way: from 0 up is a wall (stay, 6 moves left), from 14 left leads to 13 (2 moves left).
    for state, action, moves_left in [(0, UP, 6), (14, LEFT, 2), (12, DOWN, 3), (5, UP, 5), (5, RIGHT, 3)]:
        value = -sum(gamma**k for k in range(moves_left)) + gamma**moves_left * 100
        assert q_star[state, action] == pytest.approx(value, abs=1e-9)
    assert (q_star[15] == 0).all()


def test_a_policy_that_is_wrong_in_one_far_corner_is_not_optimal():
    q_table = grid.value_iteration(C)
    q_table[3, UP] = 1000.0  # 3 is on no shortest way that the greedy policy takes from 0
    assert grid.greedy_moves(C, q_table, 3) is None
    assert grid.greedy_moves(C, q_table, 0) == 6
    assert not grid.optimal_from_every_state(C, q_table)


# --- the world -------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("state", "neighbours"),  # after up, down, left, right
    [
        (0, [0, 4, 0, 1]),
        (3, [3, 7, 2, 3]),
        (12, [8, 12, 12, 13]),
        (1, [1, 5, 0, 2]),
        (4, [0, 8, 4, 5]),
        (5, [1, 9, 4, 6]),
        (7, [3, 11, 6, 7]),
        (13, [9, 13, 12, 14]),
        (11, [7, 15, 10, 11]),
        (14, [10, 14, 13, 15]),
    ],
)
def test_moves_walls_and_rewards(state, neighbours):
    assert grid.ACTIONS == ["up", "down", "left", "right"]
    for action, expected in enumerate(neighbours):
        next_state, reward, terminated = grid.step(C, state, action)
        assert next_state == expected
        assert reward == (100 if expected == 15 else -1)
        assert terminated is (expected == 15)


# --- the algorithm ---------------------------------------------------------------------------------------
def test_the_update_by_hand():
    q_table = np.zeros((16, 4))
    q_table[5, RIGHT] = 2.0
    q_table[6] = [1.0, 7.0, -3.0, 4.0]
    before = q_table.copy()
    Q_Learning.q_update(q_table, 5, RIGHT, -1.0, 6, False, alpha=0.1, gamma=0.99)
    # target -1 + 0.99 * 7 = 5.93; error 5.93 - 2 = 3.93; 2 + 0.1 * 3.93
    assert q_table[5, RIGHT] == pytest.approx(2.393, abs=1e-12)
    q_table[5, RIGHT] = 2.0
    assert (q_table == before).all()  # one entry changes, no other


def test_a_terminal_state_bootstraps_nothing_whatever_its_row_holds():
    q_table = np.zeros((16, 4))
    q_table[15] = [1e6, -1e6, 3.0, 1e6]
    Q_Learning.q_update(q_table, 14, RIGHT, 100.0, 15, True, alpha=0.1, gamma=0.99)
    assert q_table[14, RIGHT] == pytest.approx(10.0, abs=1e-12)


def test_the_step_limit_truncates_and_the_cut_off_move_still_bootstraps():
    # One move an episode, so every move is the last one before the cut. Up and left bump into the wall, and
    # what follows is the best value of the start itself: -1 + 0.99 * -1. Taken for a termination: -1.
    changed = {"PRINT_EVERY": 0, "EPSILON_END": 1.0, "NUM_EPISODES": 2000, "MAX_STEPS_PER_EPISODE": 1}
    c = SimpleNamespace(**asdict(C) | changed)  # `configure` refuses a limit below the shortest way
    q_table, log, _ = Q_Learning.train(c, np.random.default_rng(0))
    assert q_table[0] == pytest.approx([-1.99, -1.0, -1.99, -1.0], abs=1e-6)
    assert (log[:, 3] == 1).all()
    assert (q_table[1:] == 0).all()


def test_the_optimum_is_the_same_when_most_episodes_are_cut_off():
    arguments = ["MAX_STEPS_PER_EPISODE=10", "EPSILON_END=1.0", "ALPHA=0.5", "NUM_EPISODES=8000"]
    q_table, log, _ = train(arguments)
    assert log[:, 2].mean() < 0  # most earn -10; to reach the goal earns 91 or more
    assert np.abs(q_table - grid.value_iteration(C)).max() < 1e-6


def test_epsilon_falls_linearly_and_stays():
    assert Q_Learning.epsilon_at(C, 0) == 1.0
    assert Q_Learning.epsilon_at(C, 5000) == pytest.approx(0.505)
    assert Q_Learning.epsilon_at(C, 9999) > 0.01 + 1e-5
    for episode in (10000, 10001, 19999):
        assert Q_Learning.epsilon_at(C, episode) == pytest.approx(0.01, abs=1e-12)


class Coins:
    """A generator that shows what it is told."""

    def __init__(self, coin, action):
        self.coin, self.action = coin, action

    def random(self):
        return self.coin

    def integers(self, count):
        assert count == 4
        return np.int64(self.action)


def test_epsilon_is_the_probability_of_the_random_action():
    q_table = np.zeros((16, 4))
    q_table[9] = [0.0, 1.0, 5.0, 2.0]
    assert Q_Learning.select_action(9, q_table, epsilon=0.3, rng=Coins(0.29, UP)) == UP
    assert Q_Learning.select_action(9, q_table, epsilon=0.3, rng=Coins(0.3, UP)) == LEFT
    assert Q_Learning.select_action(9, q_table, epsilon=0.0, rng=Coins(0.0, UP)) == LEFT


# --- training and its log --------------------------------------------------------------------------------
def test_the_log_has_a_row_a_block_and_its_last_row_may_be_short():
    q_table, log, tables = train(["NUM_EPISODES=120", "LOG_EVERY=50"])
    assert log[:, 0].tolist() == [50, 100, 120]
    assert tables.shape == (3, 16, 4)
    assert (tables[-1] == q_table).all()
    assert (tables[0] != tables[1]).any()
    assert log[2, 1] == pytest.approx(
        np.mean([Q_Learning.epsilon_at(C, episode) for episode in range(100, 120)])
    )


def read(path):
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def test_the_result_is_of_the_table_that_was_learned(tmp_path, monkeypatch):
    q_star = grid.value_iteration(C)
    worse, wrong = q_star + 3.0, q_star.copy()
    wrong[3, UP] = 1000.0
    log = np.array([[50.0, 1, 0, 0], [100.0, 1, 0, 0]])
    monkeypatch.setattr(Q_Learning, "train", lambda c, rng: (wrong, log, np.array([worse, wrong])))
    for name in ("draw_learning_curve", "draw_q_table"):
        monkeypatch.setattr(Q_Learning.pictures, name, lambda *arguments: None)
    result = Q_Learning.main([f"RUN_DIR={tmp_path}"])
    assert result["optimal_from_every_state"] is False
    errors = [float(row["max_abs_error"]) for row in read(tmp_path / "log.csv")]
    assert errors == pytest.approx([3.0, 1000 - q_star[3, UP]])
    assert result["max_abs_error"] == errors[1]


def test_the_printed_policy_points_where_the_moves_lead():
    shown = dict(zip(pictures.ARROWS, grid.MOVES))
    assert shown == {"↑": (-1, 0), "↓": (1, 0), "←": (0, -1), "→": (0, 1)}


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_grid_of_another_size(size, tmp_path, capsys):
    """Learned, printed and drawn as it is: no 4 and no 16 is left."""
    c = Q_Learning.configure([f"SIZE={size}", "PRINT_EVERY=0", "ALPHA=1.0", "EPSILON_END=1.0"])
    q_star, goal = grid.value_iteration(c), size**2 - 1
    assert grid.greedy_moves(c, q_star, 0) == 2 * (size - 1) and grid.optimal_from_every_state(c, q_star)
    before_last = 2 * (size - 1) - 1
    value = -sum(0.99**k for k in range(before_last)) + 0.99**before_last * 100
    assert q_star[0].max() == pytest.approx(value, abs=1e-9)
    Q_Learning.main([f"SIZE={size}", "NUM_EPISODES=300", f"RUN_DIR={tmp_path}"])
    policy = capsys.readouterr().out.split("the greedy policy\n")[1].split("\n\nthe table")[0]
    lines = [line.split() for line in policy.splitlines()]
    assert [len(line) for line in lines] == [size] * size and lines[-1][-1] == "G"
    assert len(read(tmp_path / "q_table.csv")) == goal + 1
    assert grid.step(c, goal - 1, RIGHT) == (goal, 100, True)
    assert grid.step(c, 0, UP) == (0, -1, False)

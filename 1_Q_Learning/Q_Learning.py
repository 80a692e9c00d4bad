"""Q-learning on a 4x4 grid: a table of 16 states x 4 actions learns what every move is worth.

The update (Watkins 1989; Sutton & Barto, 2nd edition, eq. 6.8), after each single move:

    Q(S, A) <- Q(S, A) + alpha * (R + gamma * (1 - terminated) * max_a' Q(S', a') - Q(S, A))

What is *not* here, and why: no step size that shrinks with the visits (Watkins & Dayan 1992 need one for
their proof; this world is deterministic, so a constant one converges too), no random tie-breaking (ties
last only until the first visits), no second table against maximization bias (no noise, so no bias), no
gymnasium (the world is the five lines of `step`).

    python 1_Q_Learning/Q_Learning.py                  # 1 to 2 seconds after imports on 2 cores of an EPYC
    python 1_Q_Learning/Q_Learning.py ALPHA=1.0 SEED=1
    python 1_Q_Learning/Q_Learning.py COMPARE=True     # step sizes and epsilons side by side: half a minute
"""

import csv
import difflib
import json
import sys
import time
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException
from tqdm import tqdm
from yaml import YAMLError

matplotlib.use("Agg")
import matplotlib.pyplot as plt

# %% Constants ------------------------------------------------------------------------------------------
# Learning
ALPHA = 0.1  # share of the TD error that one visit corrects; 1.0 believes the newest target alone
GAMMA = 0.99  # worth of a reward one move later; below 1 a short way is worth more than a long one
NUM_EPISODES = 20000  # each from the start to the goal, or to the step limit
MAX_STEPS_PER_EPISODE = 100  # then the episode is truncated: cut off, not over

# Exploration: the probability of a random action falls in a straight line, then stays
EPSILON_START = 1.0  # 1: nothing but random moves
EPSILON_END = 0.01  # 0 would stop looking altogether
DECAY_EPISODES = 10000  # episodes from EPSILON_START to EPSILON_END

# Rewards
GOAL_REWARD = 100.0  # for the move that reaches the goal, instead of STEP_REWARD
STEP_REWARD = -1.0  # for every other move, bumping into a wall included

# The run
SEED = 0  # draws the exploration, the only chance in this world
LOG_EVERY = 50  # episodes averaged into one row of log.csv
PRINT_EVERY = 40  # rows of log.csv between printed lines; 0: prints none
COMPARE = False  # True: also runs other step sizes and epsilons, and draws compare.png
NUM_SEEDS = 5  # of each run of the comparison: SEED, SEED + 1, ...
RUN_DIR = ""  # empty: runs/Q_Learning/<time>

DEFAULTS = {name: value for name, value in globals().items() if name.isupper()}


class UserError(Exception):
    """Something the person at the keyboard can mend: shown as one line, exit code 2."""


def configure(arguments: list[str]) -> dict[str, Any]:
    """Sets this module's constants: the defaults, changed by `NAME=value` arguments.

    Args:
        arguments: such as ["ALPHA=0.5", "NUM_EPISODES=5000"].

    Returns:
        Every constant by name, as the run will use it.

    Raises:
        UserError: an unknown name (lists the nearest), a value of the wrong type or out of range.
    """
    constants = dict(DEFAULTS)
    for argument in arguments:
        name, equals, text = argument.partition("=")
        if name not in DEFAULTS or not equals:
            near = difflib.get_close_matches(name.upper(), DEFAULTS, n=3, cutoff=0.5)
            raise UserError(
                f"{argument!r}: no such constant; write NAME=value, nearest names: "
                f"{', '.join(near) or 'none, see the top of the script'}"
            )
        kind = type(DEFAULTS[name])
        try:
            # 1e-3 -> 0.001, True -> bool
            value = text if kind is str else OmegaConf.from_cli([argument])[name]
            if kind is float and type(value) is int:
                value = float(value)
        except (YAMLError, OmegaConfBaseException, ValueError, OverflowError):  # "[", "${x}", 400 digits
            value = None
        if type(value) is not kind:
            raise UserError(
                f"{argument!r}: {name} is of type {kind.__name__}, {text!r} is not; "
                f"write it like {DEFAULTS[name]}"
            )
        constants[name] = value
    globals().update(constants)
    check_constants()
    return constants


def check_constants() -> None:
    """Refuses values that would fail later, or teach nothing without saying so.

    Raises:
        UserError: names the constant, its value and the remedy.
    """
    # Written as `not (good)`: a comparison with nan is False, and nan is refused with the rest.
    checks = [
        ("ALPHA", 0 < ALPHA <= 1, "above 0 and at most 1; 0 learns nothing, above 1 overshoots"),
        ("GAMMA", 0 < GAMMA <= 1, "above 0 and at most 1; at 0 only the last move counts"),
        ("NUM_EPISODES", 1 <= NUM_EPISODES <= 10**7, "from 1 to 10000000"),
        ("MAX_STEPS_PER_EPISODE", 6 <= MAX_STEPS_PER_EPISODE <= 10**5, "from 6 (the shortest way) to 100000"),
        ("EPSILON_START", 0 <= EPSILON_START <= 1, "a probability, from 0 to 1"),
        ("EPSILON_END", 0 <= EPSILON_END <= EPSILON_START, f"from 0 to EPSILON_START={EPSILON_START}"),
        ("DECAY_EPISODES", DECAY_EPISODES >= 1, "1 or more; freeze epsilon by EPSILON_START = EPSILON_END"),
        ("GOAL_REWARD", 0 < GOAL_REWARD < np.inf, "above 0 and finite; else no way leads there willingly"),
        (
            "STEP_REWARD",
            -np.inf < STEP_REWARD < 0,
            "below 0 and finite; else the shortest way is not the best",
        ),
        ("SEED", SEED >= 0, "0 or more"),
        ("LOG_EVERY", LOG_EVERY >= 1, "1 or more"),
        ("PRINT_EVERY", PRINT_EVERY >= 0, "0 (no lines) or more"),
        ("NUM_SEEDS", NUM_SEEDS >= 1, "1 or more"),
    ]
    for name, good, remedy in checks:
        if not good:
            raise UserError(f"{name}={globals()[name]}: must be {remedy}")


# %% World ----------------------------------------------------------------------------------------------
#    0  1  2  3
#    4  5  6  7      start 0, goal 15
#    8  9 10 11
#   12 13 14 15
SIZE = 4
NUM_STATES, NUM_ACTIONS = SIZE * SIZE, 4
START, GOAL = 0, NUM_STATES - 1
ACTIONS = ["up", "down", "left", "right"]
ARROWS = "↑↓←→"
MOVES = [(-1, 0), (1, 0), (0, -1), (0, 1)]  # (rows, columns), in the order of ACTIONS


def step(state: int, action: int) -> tuple[int, float, bool]:
    """One move. Walls keep the agent where it is, and the move still costs STEP_REWARD.

    The move that reaches the goal earns GOAL_REWARD only; STEP_REWARD is not added to it.

    Args:
        state: 0 to 15, not the goal: from there no move is left.
        action: 0 to 3, an index into ACTIONS.

    Returns:
        next_state, reward, terminated (the goal is reached).
    """
    row, column = divmod(state, SIZE)
    rows, columns = MOVES[action]
    row = min(max(row + rows, 0), SIZE - 1)
    column = min(max(column + columns, 0), SIZE - 1)
    next_state = row * SIZE + column
    terminated = next_state == GOAL
    return next_state, GOAL_REWARD if terminated else STEP_REWARD, terminated


# %% Algorithm ------------------------------------------------------------------------------------------
def epsilon_at(episode: int) -> float:
    """The probability of a random action: EPSILON_START at episode 0, EPSILON_END from DECAY_EPISODES on."""
    return EPSILON_START + (EPSILON_END - EPSILON_START) * min(episode / DECAY_EPISODES, 1.0)


def select_action(q_table: np.ndarray, state: int, epsilon: float, coin: float, random_action: int) -> int:
    """Epsilon-greedy (Sutton & Barto, section 2.2). A random action may well be the greedy one.

    Args:
        q_table: float64 (16, 4).
        state: 0 to 15.
        epsilon: probability of the random action.
        coin: drawn uniformly from [0, 1).
        random_action: drawn uniformly from 0 to 3.

    Returns:
        The action; among equal values the first one.
    """
    return random_action if coin < epsilon else int(q_table[state].argmax())


def update(
    q_table: np.ndarray, state: int, action: int, reward: float, next_state: int, terminated: bool
) -> None:
    """The whole of Q-learning: changes one entry of the table, in place.

    Args:
        q_table: float64 (16, 4).
        state, action, reward, next_state: one move.
        terminated: the goal was reached. Being cut off by the step limit is *not* termination: the world
            would have gone on, so the value of next_state still counts.
    """
    # Sutton & Barto eq. 6.8. The max over a' and not the action taken next: this is what makes it off-policy.
    # (1 - terminated): nothing comes after the goal, whatever the table says in that row.
    td_target = reward + GAMMA * (1 - terminated) * q_table[next_state].max()
    td_error = td_target - q_table[state, action]
    q_table[state, action] += ALPHA * td_error


# %% Training -------------------------------------------------------------------------------------------
def train(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Plays NUM_EPISODES episodes from START and learns after each move.

    Args:
        rng: draws the exploration.

    Returns:
        q_table: float64 (16, 4).
        log: float64 (rows, 4), a row for each LOG_EVERY episodes (the last may have fewer): the episodes
            played so far, then the means of epsilon, return (not discounted) and steps.
        tables: float64 (rows, 16, 4), the table at the end of each row.
    """
    q_table = np.zeros((NUM_STATES, NUM_ACTIONS))
    log, tables, block = [], [], []
    for episode in tqdm(range(NUM_EPISODES), unit="episode", leave=False, disable=None):
        epsilon = epsilon_at(episode)
        # All random numbers of an episode in two calls: a call for each move would cost more than the move.
        coins = rng.random(MAX_STEPS_PER_EPISODE).tolist()
        random_actions = rng.integers(NUM_ACTIONS, size=MAX_STEPS_PER_EPISODE).tolist()
        state, episode_return, steps = START, 0.0, 0
        terminated = truncated = False
        while not (terminated or truncated):
            action = select_action(q_table, state, epsilon, coins[steps], random_actions[steps])
            next_state, reward, terminated = step(state, action)
            update(q_table, state, action, reward, next_state, terminated)
            state = next_state
            episode_return += reward
            steps += 1
            truncated = steps == MAX_STEPS_PER_EPISODE  # ends the loop, and never enters the update

        block.append((epsilon, episode_return, steps))
        done = episode + 1
        if done % LOG_EVERY == 0 or done == NUM_EPISODES:
            log.append((done, *np.mean(block, axis=0)))
            tables.append(q_table.copy())
            block = []
            if PRINT_EVERY and len(log) % PRINT_EVERY == 0:
                _, mean_epsilon, mean_return, mean_steps = log[-1]
                tqdm.write(
                    f"episode {done:6d}   epsilon {mean_epsilon:.3f}   "
                    f"return {mean_return:7.2f}   steps {mean_steps:6.2f}"
                )
    return q_table, np.array(log), np.array(tables)


# %% Evaluation -----------------------------------------------------------------------------------------
def value_iteration() -> np.ndarray:
    """The optimal action values, computed from the rules of the world, which the learner never sees.

    Repeats the Bellman optimality equation (Sutton & Barto eq. 3.20) for all pairs until it changes nothing
    any more, as section 4.4 does for V.

    Returns:
        q_star: float64 (16, 4); the goal's row is 0.
    """
    q_star = np.zeros((NUM_STATES, NUM_ACTIONS))
    change = np.inf
    while change > 1e-12:
        previous = q_star.copy()
        for state in range(NUM_STATES):
            if state == GOAL:
                continue
            for action in range(NUM_ACTIONS):
                next_state, reward, terminated = step(state, action)
                # q*(s, a) = r + gamma * max_a' q*(s', a')
                q_star[state, action] = reward + GAMMA * (1 - terminated) * previous[next_state].max()
        change = np.abs(q_star - previous).max()
    return q_star


def greedy_moves(q_table: np.ndarray, state: int) -> int | None:
    """Follows the greedy policy from a state.

    Returns:
        The number of moves to the goal (0 at the goal), or None when the policy never gets there.
    """
    for moves in range(NUM_STATES):  # a way that visits no state twice is shorter than this
        if state == GOAL:
            return moves
        state, _, _ = step(state, int(q_table[state].argmax()))
    return None


def optimal_from_every_state(q_table: np.ndarray) -> bool:
    """Whether the greedy policy takes the shortest way from every state, those it never visits included."""
    last = SIZE - 1
    return all(
        greedy_moves(q_table, state) == (last - state // SIZE) + (last - state % SIZE)
        for state in range(NUM_STATES)
    )


# %% Output ---------------------------------------------------------------------------------------------
def policy_text(q_table: np.ndarray) -> str:
    """The greedy policy as four lines of arrows, G at the goal."""
    arrows = [ARROWS[action] for action in q_table.argmax(axis=1)]
    arrows[GOAL] = "G"
    return "\n".join("  " + " ".join(arrows[row : row + SIZE]) for row in range(0, NUM_STATES, SIZE))


def table_text(q_table: np.ndarray) -> str:
    """The table with a header, a line for each state."""
    lines = ["state" + "".join(f"{name:>9}" for name in ACTIONS)]
    lines += [f"{state:5d}" + "".join(f"{q:9.3f}" for q in q_table[state]) for state in range(NUM_STATES)]
    return "\n".join(lines)


def write_csv(path: Path, header: list[str], rows: Any) -> None:
    """Writes a table; numbers in full, so that everything shown can be computed again from the file."""
    with open(path, "w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(header)
        writer.writerows(rows)


# %% Pictures -------------------------------------------------------------------------------------------
FLOOR = 1e-14  # an error of exactly 0 has no place on a logarithmic axis: it is drawn here


def draw_learning_curve(path: Path, log: np.ndarray, errors: np.ndarray, best_return: float) -> None:
    """Left: return and epsilon against episodes. Right: the largest error of the table.

    Args:
        path: of the PNG file.
        log: float64 (rows, 4), see `train`.
        errors: float64 (rows,), largest absolute error at the end of each row.
        best_return: of the shortest way from START.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 3.6), facecolor="white", layout="constrained")
    left.plot(log[:, 0], log[:, 2], color="#1f77b4", label=f"return (mean of {LOG_EVERY} episodes)")
    left.axhline(best_return, color="#ff7f0e", linestyle="--", label=f"best possible: {best_return:g}")
    left.set(xlabel="episode", ylabel="return")
    chance = left.twinx()
    left.plot([], [], color="#888888", label="epsilon (right axis)")
    chance.plot(log[:, 0], log[:, 1], color="#888888")
    chance.set(ylim=(0, 1.05), ylabel="epsilon")
    left.set_xticks(np.linspace(0, NUM_EPISODES, 5))
    left.legend(frameon=False, loc="center right")
    right.loglog(log[:, 0], np.maximum(errors, FLOOR), color="#1f77b4")
    right.set(xlabel="episode", ylabel="largest |Q − Q*| over all pairs")
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_q_table(path: Path, q_table: np.ndarray) -> None:
    """The grid: each cell split into a triangle an action, coloured and labelled by Q; the greedy arrow."""
    figure, axes = plt.subplots(figsize=(7.4, 6.4), facecolor="white", layout="constrained")
    corners = np.array([(0, 0), (1, 0), (1, 1), (0, 1)])  # (x, y), y downwards; top edge first, clockwise
    edges = [(0, 1), (2, 3), (3, 0), (1, 2)]  # the two corners on the side of up, down, left, right
    states = [state for state in range(NUM_STATES) if state != GOAL]
    triangles = [
        np.array([corners[first], corners[second], (0.5, 0.5)]) + np.array([state % SIZE, state // SIZE])
        for state in states
        for first, second in edges
    ]
    patches = matplotlib.collections.PolyCollection(
        triangles, array=q_table[states].ravel(), cmap="viridis", edgecolors="white", linewidths=0.8
    )
    axes.add_collection(patches)
    middle = q_table[states].min() / 2 + q_table[states].max() / 2
    for state in states:
        centre = np.array([state % SIZE + 0.5, state // SIZE + 0.5])
        for action, (rows, columns) in enumerate(MOVES):
            q = q_table[state, action]
            axes.text(
                *(centre + 0.34 * np.array([columns, rows])),
                f"{q:.1f}",
                ha="center",
                va="center",
                fontsize=8.5,
                color="white" if q < middle else "black",
            )
        rows, columns = MOVES[q_table[state].argmax()]
        direction = np.array([columns, rows])
        axes.annotate(
            "",
            xy=centre + 0.2 * direction,
            xytext=centre - 0.14 * direction,
            arrowprops={"arrowstyle": "-|>", "color": "#d62728", "linewidth": 2.2, "mutation_scale": 16},
        )
    axes.text(GOAL % SIZE + 0.5, GOAL // SIZE + 0.5, "goal", ha="center", va="center", fontsize=13)
    axes.text(START % SIZE + 0.5, START // SIZE - 0.04, "start", ha="center", va="bottom", fontsize=13)
    axes.set(xlim=(0, SIZE), ylim=(SIZE, 0), aspect="equal", xticks=[], yticks=[])
    figure.colorbar(patches, ax=axes, label="Q(state, action)", shrink=0.85)
    figure.savefig(path, dpi=110)
    plt.close(figure)


# %% Comparison -----------------------------------------------------------------------------------------
COMPARISON = [  # what to change on the command line, and its colour
    ([], "#1f77b4"),
    (["ALPHA=0.01"], "#ff7f0e"),
    (["ALPHA=1.0"], "#888888"),
    (["EPSILON_END=1.0"], "#2ca02c"),
    (["EPSILON_START=0.01"], "#d62728"),
]


def compare(run_dir: Path, arguments: list[str]) -> None:
    """Trains every entry of COMPARISON with NUM_SEEDS seeds and writes what came of it.

    compare.csv has a row for each training; compare_curves.csv one for each point of compare.png, which shows
    the geometric mean of the error, the mean of the return, and bands from the lowest seed to the highest.

    Args:
        run_dir: where the files go.
        arguments: of the command line; they hold for every entry that does not change them.
    """
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.2), facecolor="white", layout="constrained")
    results, points = [], []
    for changes, colour in COMPARISON:
        label = " ".join(changes) or "unchanged"
        errors, returns = [], []
        for seed in range(SEED, SEED + NUM_SEEDS):
            configure([*arguments, *changes, "PRINT_EVERY=0"])
            q_table, log, tables = train(np.random.default_rng(seed))
            error = np.abs(tables - value_iteration())  # (rows, 16, 4)
            errors.append(error.max(axis=(1, 2)))
            returns.append(log[:, 2])
            close = np.flatnonzero(errors[-1] < 1e-6)
            result = {
                "changed": label,
                "seed": seed,
                "max_abs_error": errors[-1][-1],
                "pairs_off_by_0.01": int((error[-1] > 0.01).sum()),
                "optimal_from_every_state": optimal_from_every_state(q_table),
                "episodes_to_1e-6": int(log[close[0], 0]) if len(close) else "never",
                "return_of_last_1000_episodes": log[log[:, 0] > NUM_EPISODES - 1000, 2].mean(),
            }
            results.append(result)
            print("   ".join(f"{name} {value}" for name, value in result.items()))

        curves = [np.maximum(errors, FLOOR), np.array(returns)]  # (seeds, log rows) each
        means = [np.exp(np.log(curves[0]).mean(axis=0)), curves[1].mean(axis=0)]
        for axes, curve, mean in zip((left, right), curves, means):
            # The first one thick: where a later one lies upon it, both are seen.
            axes.semilogx(log[:, 0], mean, color=colour, label=label, linewidth=1.5 if changes else 4)
            axes.fill_between(
                log[:, 0], curve.min(axis=0), curve.max(axis=0), color=colour, alpha=0.2, linewidth=0
            )
        bands = [
            band
            for curve, mean in zip(curves, means)
            for band in (mean, curve.min(axis=0), curve.max(axis=0))
        ]
        for episode, *values in np.column_stack([log[:, 0], *bands]):
            points.append((label, int(episode), *(f"{value:.4g}" for value in values)))
    configure(arguments)
    left.set(xlabel="episode", ylabel="largest |Q − Q*| over all pairs", yscale="log")
    right.set(xlabel="episode", ylabel=f"return (mean of {LOG_EVERY} episodes)")
    figure.legend(*left.get_legend_handles_labels(), loc="outside lower center", ncols=5, frameon=False)
    figure.savefig(run_dir / "compare.png", dpi=110)
    plt.close(figure)
    write_csv(run_dir / "compare.csv", list(results[0]), [result.values() for result in results])
    header = "changed episode error_mean error_min error_max return_mean return_min return_max"
    write_csv(run_dir / "compare_curves.csv", header.split(), points)


# %% The run --------------------------------------------------------------------------------------------
def open_run_dir(constants: dict[str, Any]) -> Path:
    """Makes the folder of this run and writes the constants into it.

    Raises:
        UserError: the folder cannot be written, or holds another run.
    """
    run_dir = Path(RUN_DIR or time.strftime("runs/Q_Learning/%Y-%m-%d_%H-%M-%S"))
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        if (run_dir / "result.json").exists():
            raise UserError(f"RUN_DIR={run_dir}: holds the result of another run; choose another folder")
        (run_dir / "constants.json").write_text(json.dumps(constants, indent=1) + "\n")
    except OSError as error:
        raise UserError(f"RUN_DIR={run_dir}: {error.strerror}; choose another folder") from None
    return run_dir


def run(arguments: list[str]) -> dict[str, Any]:
    """One whole run: trains, compares with the optimum, writes everything into the run's folder.

    Args:
        arguments: `NAME=value` each.

    Returns:
        What result.json holds: max_abs_error (over all pairs, against value iteration),
        optimal_from_every_state, seconds (wall time after imports, pictures included).

    Raises:
        UserError: see `configure` and `open_run_dir`.
    """
    started = time.perf_counter()
    constants = configure(arguments)
    if COMPARE:  # an entry that clashes with the command line is refused now, not after all the training
        for changes, _ in COMPARISON:
            configure([*arguments, *changes])
        configure(arguments)
    run_dir = open_run_dir(constants)
    q_table, log, tables = train(np.random.default_rng(SEED))

    q_star = value_iteration()
    errors = np.abs(tables - q_star).max(axis=(1, 2))  # (rows,)
    best_return = GOAL_REWARD + STEP_REWARD * (greedy_moves(q_star, START) - 1)
    max_abs_error = float(np.abs(q_table - q_star).max())
    optimal = optimal_from_every_state(q_table)
    print(f"\nthe greedy policy\n{policy_text(q_table)}\n\nthe table\n{table_text(q_table)}\n")
    print(f"largest distance to the optimum (value iteration), over all pairs: {max_abs_error:.2g}")
    print(
        f"shortest way from every state: {'yes' if optimal else 'no'}; best possible return: {best_return:g}"
    )

    write_csv(
        run_dir / "log.csv",
        ["episode", "epsilon", "return", "steps", "max_abs_error"],
        [(int(row[0]), *row[1:].tolist(), error) for row, error in zip(log, errors.tolist())],
    )
    write_csv(
        run_dir / "q_table.csv",
        ["state", *ACTIONS],
        [(state, *q_table[state].tolist()) for state in range(NUM_STATES)],
    )
    draw_learning_curve(run_dir / "learning_curve.png", log, errors, best_return)
    draw_q_table(run_dir / "q_table.png", q_table)
    if COMPARE:
        compare(run_dir, arguments)

    result = {
        "max_abs_error": max_abs_error,
        "optimal_from_every_state": optimal,
        "seconds": time.perf_counter() - started,
    }
    (run_dir / "result.json").write_text(json.dumps(result, indent=1) + "\n")
    print(f"{result['seconds']:.1f} s; everything of this run is in {run_dir}")
    return result


def main() -> None:
    """Runs the script with the command line's constants; exit code 2 on the user's errors, 130 on Ctrl-C."""
    try:
        run(sys.argv[1:])
    except UserError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("\nstopped; nothing was kept of this run", file=sys.stderr)
        sys.exit(130)


if __name__ == "__main__":
    main()

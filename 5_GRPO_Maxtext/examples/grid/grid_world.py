"""Chapter 1's grid as an environment for a language model: ENVIRONMENT=examples/grid/grid_world.py.

The question names the start, "row 2 column 3"; "slippery row 2 column 3" and "walls row 2 column 3"
are two harder grids. The model writes up, down, left or right and reads where it is. After any
other word it stays put. Every move costs 1; the one that reaches row 4 column 4 earns 100 instead.
"""

import functools

import numpy as np

SIZE = 4
GOAL = (SIZE - 1, SIZE - 1)
GOAL_REWARD, STEP_REWARD = 100.0, -1.0
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}  # (rows, columns)
SLIP = {"slippery": 0.2}  # by grid, the probability of a random move
BLOCKED = {"walls": {(1, 1), (1, 3), (2, 2)}}  # by grid, cells you can't enter


def moved(world: str, place: tuple[int, int], move: tuple[int, int]) -> tuple[int, int]:
    """Where a move leads; at the edge or a wall you stay put."""
    row, column = place[0] + move[0], place[1] + move[1]
    inside = 0 <= row < SIZE and 0 <= column < SIZE
    return (row, column) if inside and (row, column) not in BLOCKED.get(world, ()) else place


def in_words(place: tuple[int, int]) -> str:
    """A cell, counted from 1."""
    return f"row {place[0] + 1} column {place[1] + 1}"


def read(words: str) -> tuple[str, tuple[int, int]]:
    """Parses a question: the grid ("" for the plain one) and the cell."""
    *world, _, row, _, column = words.split()
    return " ".join(world), (int(row) - 1, int(column) - 1)


class Environment:
    """One episode."""

    def reset(self, question: str, rng: np.random.Generator) -> str:
        """Starts at the question's cell; adds nothing to the prompt."""
        self.world, self.place = read(question)
        self.rng = rng
        return ""

    def step(self, action: str) -> tuple[str, float, bool, bool]:
        """One move: the new cell, its reward, whether it's the goal; never truncated."""
        move = MOVES.get(action.strip(), (0, 0))
        if self.rng.random() < SLIP.get(self.world, 0.0):
            move = list(MOVES.values())[self.rng.integers(len(MOVES))]
        self.place = moved(self.world, self.place, move)
        reached = self.place == GOAL
        return in_words(self.place), GOAL_REWARD if reached else STEP_REWARD, reached, False

    @staticmethod
    def picture(question: str, text: str) -> str:
        """An episode's path on the grid, as an SVG; each cell shows V* at chapter 1's discount of
        0.99.
        """
        world, start = read(question)
        moves, heard = text.split("\n")[::2], text.split("\n")[1::2]
        values = q_star(world, 0.99)
        places = [start, *(read(observation)[1] for observation in heard)]
        if len(moves) > len(heard):  # there's no observation after the last move
            places.append(moved(world, places[-1], MOVES.get(moves[-1], (0, 0))))
        cells = []
        for row, column in (divmod(i, SIZE) for i in range(SIZE**2)):
            best = max((values.get(((row, column), move), 0.0) for move in MOVES), default=0.0)
            name = "#" if (row, column) in BLOCKED.get(world, ()) else f"{best:.0f}"
            name = "goal" if (row, column) == GOAL else name
            cells.append(
                f'<rect x="{40 * column}" y="{40 * row}" width="40" height="40" fill="none" '
                f'stroke="#888"/><text x="{40 * column + 3}" y="{40 * row + 11}" '
                f'font-size="9" fill="#888">{name}</text>'
            )
        path = " ".join(f"{40 * column + 20},{40 * row + 22}" for row, column in places)
        x, y = path.split()[-1].split(",")
        return (
            f'<svg viewBox="-1 -1 162 162">{"".join(cells)}<polyline points="{path}" fill="none" '
            f'stroke="#1f77b4" stroke-width="3"/><circle cx="{x}" '
            f'cy="{y}" r="5" fill="#1f77b4"/></svg>'
        )


# %% Its optimum, which the model never sees -------------------------------------------------------
def starts(world: str) -> list[tuple[int, int]]:
    """Every cell except the goal and the walls."""
    cells = [divmod(i, SIZE) for i in range(SIZE**2)]
    return [cell for cell in cells if cell != GOAL and cell not in BLOCKED.get(world, ())]


@functools.cache
def q_star(world: str, gamma: float) -> dict[tuple[tuple[int, int], str], float]:
    """The optimal value of each move from each cell (Sutton & Barto, eq. 4.2's fixed point).

    An invalid move such as "wait" has the value of staying put, move (0, 0), here under "".
    """
    slip, moves = SLIP.get(world, 0.0), MOVES | {"": (0, 0)}
    value = dict.fromkeys([*starts(world), GOAL], 0.0)

    def worth(cell, move):
        to = moved(world, cell, move)
        return GOAL_REWARD if to == GOAL else STEP_REWARD + gamma * value[to]

    def q(cell, move):
        slipped = sum(worth(cell, other) for other in MOVES.values()) / len(MOVES)
        return (1 - slip) * worth(cell, move) + slip * slipped

    for _ in range(1_000):  # far more sweeps than it needs
        value |= {cell: max(q(cell, move) for move in MOVES.values()) for cell in starts(world)}
    return {(cell, name): q(cell, move) for cell in starts(world) for name, move in moves.items()}

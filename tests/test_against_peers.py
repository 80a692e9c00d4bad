"""The tables against the peers: the rows that the script would write."""

import math

import against_peers


def test_a_row_by_hand():
    entry = against_peers.Entry("somebody", "peer.py", 2)
    result = {
        "version": "0.1", "env_steps": 300, "seconds": 5.0, "processor_seconds": 4.0, "compile_seconds": 1.0,
        "eval_return": [480.0, 100.0],
        "curves": [[(100, 2.0, 20.0), (200, 3.0, 475.0), (300, 4.0, 500.0)], [(300, 4.0, 474.9)]],
    }  # fmt: skip
    rows = against_peers.rows_of(entry, [0, 1], result, 475)
    reached = [(row["env_steps_to_threshold"], row["seconds_to_threshold"]) for row in rows]
    assert reached == [(200, 3.0), ("", "")]
    [line] = against_peers.table(rows)
    half = 12.7062 * math.sqrt(2 * 190**2) / math.sqrt(2)  # Student's t of one degree of freedom, 97.5 %
    interval = f"{290 - half:.1f} … {290 + half:.1f}".replace("-", "−")
    cells = "| somebody | 300 | 2 together | 5.0 s | 4.0 s | 1.0 s | 290.0 ± 268.7 |"
    assert line == f"{cells} {interval} | 1 / 2 | 200 | 3.0 s |"

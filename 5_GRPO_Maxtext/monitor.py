"""Memory, and profiler traces: the two things to watch that no library logs for us."""

import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import jax
import numpy as np
import psutil


def memory_gib() -> dict[str, float]:
    """GiB in use now, by column of train_log.csv: this process on the host, and each of its devices.

    On a device: what the runtime has given out, and its largest value so far (TPU, GPU). A CPU's runtime
    keeps no such count: there it is the arrays that are alive, without the temporaries inside a program.
    """
    used = {"memory_host_gib": psutil.Process().memory_info().rss / 2**30}
    alive = dict.fromkeys(jax.local_devices(), 0)
    if next(iter(alive)).memory_stats() is None:
        for array in jax.live_arrays():
            if not array.is_deleted():
                piece = int(np.prod(array.sharding.shard_shape(array.shape))) * array.dtype.itemsize
                for device in array.sharding.addressable_devices:
                    alive[device] += piece
    for device in alive:
        stats = device.memory_stats() or {"bytes_in_use": alive[device]}
        used[f"memory_device_{device.id}_gib"] = stats["bytes_in_use"] / 2**30
        if "peak_bytes_in_use" in stats:
            used[f"memory_device_{device.id}_peak_gib"] = stats["peak_bytes_in_use"] / 2**30
    return used


def parse_steps(text: str, last: int) -> range:
    """Steps to trace, from "5" or "5-7" (both included).

    Raises:
        ValueError: another text, or steps that the run does not have (1 to `last`); the message is ready
            to show.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text)
    steps = range(int(match[1]), int(match[2] or match[1]) + 1) if match else range(0)
    if not steps or steps[0] < 1 or steps[-1] > last:
        raise ValueError(
            f"PROFILE_STEPS={text}: write a step or the first and the last, such as 3 or 3-4, "
            f"from 1 to {last}"
        )
    return steps


def traced(
    batches: Iterable[Any], first_step: int, steps: range, folder: str, finish: Callable[[], Any]
) -> Iterator[Any]:
    """Yields `batches`, with jax's profiler on while the chosen steps run: sampling, rewards and update.

    A step begins when its batch is asked for, and has ended when the next one is.

    Args:
        batches: one for each training step.
        first_step: of them, counted from 1.
        steps: consecutive steps to trace; on a resume those that are left.
        folder: where TensorBoard looks for the trace.
        finish: waits until the devices have done all they were given.
    """
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # each Python call would make the file a hundred times as large
    tracing = False
    try:
        for step, batch in enumerate(batches, start=first_step):
            if tracing and step not in steps:
                finish()
                jax.profiler.stop_trace()
                tracing = False
            elif step in steps and not tracing:
                jax.profiler.start_trace(folder, profiler_options=options)
                tracing = True
            yield batch
    finally:
        if tracing:
            finish()
            jax.profiler.stop_trace()

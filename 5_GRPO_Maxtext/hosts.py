"""Several hosts through jax.distributed: one process on each runs the same command with DISTRIBUTED=True.

Every host reads the same questions, draws the same answers and grades them all: cheap, and then nothing but
the model has to agree. The model's arrays are cut over the devices of all hosts, and each host puts its own
piece of a batch on its devices. The first host writes RUN_DIR, the others a folder host_<i> in it; the
checkpoints are written by all together, and need a folder that all hosts see.
"""

import os
import sys
import time
from typing import Any

import jax
import numpy as np
from jax.experimental import multihost_utils
from jax.interpreters import pxla
from tunix.rl import utils as rl_utils
from tunix.sft import sharding_utils


def join() -> None:
    """Joins the other hosts; before jax is asked for its devices.

    On a TPU slice, under SLURM and Open MPI jax finds the others itself. Elsewhere the environment says who
    they are: JAX_COORDINATOR_ADDRESS (host:port of the first), JAX_NUM_PROCESSES, JAX_PROCESS_ID.

    Raises:
        ValueError: the others are not found; the message is ready to show.
    """
    try:
        count, index = (
            int(os.environ[name]) if name in os.environ else None
            for name in ("JAX_NUM_PROCESSES", "JAX_PROCESS_ID")
        )
        jax.distributed.initialize(num_processes=count, process_id=index)
    except (ValueError, RuntimeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(
            f"DISTRIBUTED=True: jax does not find the other hosts ({reason}); set JAX_COORDINATOR_ADDRESS, "
            "JAX_NUM_PROCESSES and JAX_PROCESS_ID on each, or DISTRIBUTED=False"
        ) from None
    sharding_utils.shard_input = shard_input
    # Tunix keeps a copy of the weights in host memory, for agents; jax cannot copy there what lies on several
    # hosts, and nothing here asks for it.
    rl_utils.put_params_on_memory_kind = lambda params, memory_kind: None
    if not is_first():
        sys.stdout = open(os.devnull, "w")  # noqa: SIM115  (to the end of the process)


def is_first() -> bool:
    """Whether this process writes the report and talks to the terminal."""
    return jax.process_index() == 0


def start_time() -> int:
    """Seconds since 1970 on the first host's clock, the same on all."""
    return int(multihost_utils.broadcast_one_to_all(np.uint32(time.time())))


def all_agree(here: bool) -> bool:
    """Whether `here` is true on every host. What one host alone decides leaves the others waiting for it."""
    if jax.process_count() == 1:
        return here
    return bool(np.all(multihost_utils.process_allgather(np.bool_(here))))


def shard_input(batch: Any, axes: tuple[str, ...]) -> Any:
    """Tunix's function of that name, for hosts that all hold the whole batch.

    Tunix takes what a host holds for a part of a larger batch: with two hosts it would train on every answer
    twice, and compare it with reference log-probs of the wrong half.

    Args:
        batch: any tree of arrays, the same on every host.
        axes: mesh axes along which the first dimension is cut.
    """
    mesh = pxla.thread_resources.env.physical_mesh
    pspec = jax.sharding.PartitionSpec(*axes)
    return jax.tree.map(
        lambda x: jax.device_put(x, sharding_utils.get_sharding(x, mesh=mesh, pspec=pspec)), batch
    )

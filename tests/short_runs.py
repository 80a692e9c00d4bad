"""Short runs of the main script for several test files: in this process, or in one that can be
killed.
"""

import contextlib
import functools
import io
import multiprocessing
import os
import socket
import subprocess
import sys
import time
import tomllib
from concurrent import futures
from pathlib import Path

import settings

SCRIPT = settings.HERE / "grpo_llama3_1_8b_demo.py"
SHORT = [
    "NUM_BATCHES=8",
    # not the defaults: once on a batch, and a rate at which 8 steps change the answers
    "NUM_ITERATIONS=1",
    "LEARNING_RATE=1e-3",
    "BATCH_SIZE=4",
    "NUM_GENERATIONS=4",
    "NUM_TEST_QUESTIONS=16",
    "SAVE_INTERVAL_STEPS=2",
    "EVAL_EVERY=4",
    "EVAL_QUESTIONS=8",
    "LOG_ANSWERS_EVERY=2",
    "EVAL_CONFIG=liberal",  # the same program as in training, at another temperature
]
HANGS = 900  # seconds; only against a process that never ends

# which runs can differ in
CONSTANTS = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


def taken_again(make, name_of):
    """`make` of a model or an engine, but the second of a name is the first, all of it as it was
    then.

    To trace and lower its programs, and to read them back compiled, is two thirds of a short run.
    `name_of` the arguments: None means anew.
    """
    import jax
    import numpy as np
    from flax import nnx

    made = {}

    def take(*arguments):
        name = name_of(*arguments)
        if name not in made or name is None:
            new = make(*arguments)
            engine = getattr(new, "rollout", new)
            weights = nnx.state(engine.model(), nnx.Param)
            # the first update gives the arrays themselves away
            copies = jax.tree.map(np.array, weights)
            made[name] = (
                new,
                copies,
                jax.tree.map(lambda x: x.sharding, weights),
                dict(vars(engine)),
            )
            return new
        new, copies, places, attributes = made[name]
        engine = getattr(new, "rollout", new)
        nnx.update(engine.model(), jax.tree.map(jax.device_put, copies, places))
        vars(engine).update(attributes)
        return new

    return take


def kept(make, name_of):
    """`make`, but of arguments with the same name it returns what it returned."""
    made = {}

    def take(*arguments, **more):
        name = name_of(*arguments, **more)
        if name not in made:
            made[name] = make(*arguments, **more)
        return made[name]

    return take


def share_programs(patch):
    """Runs and engines of this process that have the same model and the same sizes share them."""
    import grpo_llama3_1_8b_demo as demo
    import grpo_variants
    from constants import Variants
    from model import llama
    from model.llm import Llm
    from run import start, trained_model

    read = kept(llama.pyconfig.initialize, lambda *a, **more: repr((a, sorted(more.items()))))
    patch.setattr(llama.pyconfig, "initialize", read)

    def name(c, folder, beside, *more):
        if vars(c).get("LORA_RANK"):  # the reference shares its weights
            return None
        seen = {name: value for name, value in vars(c).items() if name not in CONSTANTS[beside]}
        return folder.resolve(), *more, *seen.items()

    take = taken_again(start.load_llm, lambda c, folder, *_: name(c, folder, "beside_the_model"))

    def load_llm(c, *more):
        made = take(c, *more)
        return Llm(
            c,
            made.actor,
            made.reference,
            made.rollout,
            made._rollout_config,
            made.mesh,
            made._axis_rules,
        )

    patch.setattr(start, "load_llm", load_llm)

    # `update` takes both as static arguments: other objects of the same constants would be traced
    # anew.
    steps, method = CONSTANTS["of_the_optimizer"], ("EPSILON", *Variants.__dataclass_fields__)
    for module, function, names in (
        (demo, "make_optimizer", steps),
        (grpo_variants, "choose", method),
    ):
        key = functools.partial(
            lambda names, c, *more: tuple(getattr(c, name) for name in names), names
        )
        patch.setattr(module, function, kept(getattr(module, function), key))

    def engine(c, tokenizer, count, checkpoint=None):
        trained_with = checkpoint.constants if checkpoint else {}
        if trained_with.get("LORA_RANK"):
            return None
        folder, clip = settings.find_path(c.MODEL), trained_with.get("LOGITS_CLIP", 0.0)
        return name(c, folder, "beside_the_engine", min(c.BATCH_SIZE, count), clip)

    patch.setattr(trained_model, "make_rollout", taken_again(trained_model.make_rollout, engine))


def run_here(folder, *arguments):
    """The main script in this process, RUN_DIR=run in `folder`; returns what it said."""
    import grpo_llama3_1_8b_demo as demo

    with contextlib.chdir(folder), contextlib.redirect_stdout(io.StringIO()) as out:
        demo.main([*arguments, "RUN_DIR=run"])
    (Path(folder) / "said.txt").write_text(out.getvalue())
    return out.getvalue()


def load_weights(run_dir, step, place="checkpoints"):
    """Weights and optimizer state of a checkpoint, as numpy arrays by name."""
    import jax
    import numpy as np
    import orbax.checkpoint as ocp

    folder = Path(run_dir).resolve() / place / str(step)
    arrays = {}
    for item in ("weights", "moments"):
        tree = ocp.PyTreeCheckpointer().restore(folder / item)
        for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
            arrays[item + jax.tree_util.keystr(path)] = np.asarray(leaf)
    return arrays


def saved_steps(run_dir):
    """The checkpoints of a run; one that is still being written has another kind of name."""
    return sorted(
        int(path.name) for path in Path(run_dir, "checkpoints").glob("*") if path.name.isdigit()
    )


def start(folder, *arguments, **environment):
    """The main script in its own process, with these environment variables beside this one's."""
    return subprocess.Popen(
        [sys.executable, SCRIPT, *arguments],
        cwd=folder,
        env=os.environ | environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def in_a_process(function, *arguments, **environment):
    """What a test file's function returns in a new process, with these environment variables."""
    import pytest

    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        with futures.ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
            return pool.submit(function, *arguments).result()


def free_port():
    """A port of this machine that nobody listens on."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        return server.getsockname()[1]


def finish(process):
    """Waits for the process; its standard output."""
    out, err = process.communicate(timeout=HANGS)
    assert process.returncode == 0, err[-3000:]
    return out


def wait_for(condition, process):
    """Waits until `condition` holds; the process has to live until then."""
    end = time.monotonic() + HANGS
    while not condition():
        assert process.poll() is None and time.monotonic() < end, process.stderr.read()[-3000:]
        time.sleep(0.002)

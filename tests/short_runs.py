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
from concurrent import futures
from pathlib import Path

import settings

SCRIPT = settings.HERE / "grpo_llama3_1_8b_demo.py"
SHORT = [  # a run of seconds
    "NUM_BATCHES=8",
    "BATCH_SIZE=4",
    "NUM_GENERATIONS=4",
    "NUM_ITERATIONS=1",
    "LEARNING_RATE=1e-3",
    "SAVE_INTERVAL_STEPS=2",
    "EVAL_EVERY=4",
    "EVAL_QUESTIONS=8",
    "NUM_TEST_QUESTIONS=16",
    "LOG_ANSWERS_EVERY=2",
    "EVAL_CONFIG=liberal",
]
HANGS = 900  # seconds; only against a process that never ends

# of an engine; of itself they read nothing but what follows from the arguments it's made of
TRACED = ("_prefill", "_spread", "_decode", "_first", "_next")


def share_programs(patch):
    """Runs and engines of this process share what JAX has traced for equal arguments.

    To trace and lower its programs, and to read them back compiled, is most of a short run. Only
    results for *all* the same arguments are shared, so a run has the programs that it would have
    traced itself. It loads its own weights, and keeps its own state.
    """
    from flax import nnx

    import grpo_llama3_1_8b_demo as demo
    from model import llama
    from model.rollout import MaxTextRollout

    configs, structures, engines = {}, {}, {}
    read_config, read_model = llama.pyconfig.initialize, llama.load_llama
    make_engine = MaxTextRollout.__init__

    def initialize(*arguments, **changes):
        key = repr((arguments, sorted(changes.items())))
        if key not in configs:
            configs[key] = read_config(*arguments, **changes)
        return configs[key]

    def load_llama(folder, hf, config, pad_id, devices=None):
        model, mesh = read_model(folder, hf, config, pad_id, devices)
        structure, weights = nnx.split(model)
        # equal ones are compared by the objects in them, such as the config's functions; the types
        # differ where a test has MaxText's own modules
        types = tuple(type(node) for _, node in nnx.iter_graph(model))
        key = id(config), repr((hf, pad_id, devices)), types
        return nnx.merge(structures.setdefault(key, structure), weights), mesh

    def __init__(
        self, actor, tokenizer, mesh, how, *, maxtext_config, hf, prompt_config=None, **options
    ):
        made_of = dict(maxtext_config=maxtext_config, hf=hf, prompt_config=prompt_config, **options)
        make_engine(self, actor, tokenizer, mesh, how, **made_of)
        if options.get("merge"):  # LoRA
            return
        tokens = tokenizer.pad_id(), tokenizer.eos_ids
        # equal configs are one object, which `configs` keeps
        ids = id(maxtext_config), id(prompt_config)
        key = mesh, ids, repr((tokens, how, hf, options))
        traced = engines.setdefault(key, {name: getattr(self, name) for name in TRACED})
        vars(self).update(traced)

    patch.setattr(llama.pyconfig, "initialize", initialize)
    patch.setattr(llama, "load_llama", load_llama)
    patch.setattr(MaxTextRollout, "__init__", __init__)
    # `update` takes it as a static argument, and another object would be traced anew
    patch.setattr(demo, "make_optimizer", functools.cache(demo.make_optimizer))


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

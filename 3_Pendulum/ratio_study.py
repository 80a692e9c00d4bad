"""What the clip does: the ratio of single actions over the ten passes of one update, with it and
without.

python 3_Pendulum/ratio_study.py            # the first update of ppo.py's first seed: 20 seconds
python 3_Pendulum/ratio_study.py SEED=1     # constants of ppo.py
"""

import functools
import itertools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np

import ppo
import runs
import settings

NO_CLIP = 1e9
EVERY = 50  # of the rollout's steps, every fiftieth is written down: 20 of 1,000


# %% One update ------------------------------------------------------------------------------------
def first_rollout(c: ppo.Constants) -> tuple[ppo.Agent, ppo.Batch, jax.Array]:
    """What `ppo.train` has at hand when it begins to learn for the first time: agent, batch, random
    key.
    """
    agent = ppo.make_agent(c, c.SEED)
    _, collect_rng, learn_rng = jax.random.split(agent.rng, 3)  # as in `ppo.update`
    agent, rollout = jax.jit(functools.partial(ppo.collect, c))(agent, collect_rng)
    return agent, ppo.judge(c, rollout), learn_rng


def ratios_after(
    c: ppo.Constants, agent: ppo.Agent, batch: ppo.Batch, rng: jax.Array
) -> np.ndarray:
    """Each action's ratio after 0, 1, ... NUM_EPOCHS passes, [NUM_EPOCHS + 1, B].

    With the same key, the first passes are the same however many follow. So the result of
    `ppo.learn` with n passes is the state after n of the NUM_EPOCHS.
    """

    @functools.partial(jax.jit, static_argnums=0)
    def after(passes: int) -> jax.Array:
        moved, _ = ppo.learn(replace(c, NUM_EPOCHS=passes), agent, batch, rng)
        return jnp.exp(ppo.policy(moved.actor, batch.obs).log_prob(batch.action) - batch.log_prob)

    return np.stack([np.ones(len(batch.obs)), *(after(1 + i) for i in range(c.NUM_EPOCHS))])


# %% Main ------------------------------------------------------------------------------------------
def main(arguments: list[str]) -> None:
    """The same update with the clip and without; writes ratio_passes.csv into the run's folder."""
    c = settings.read(ppo.Constants, arguments)
    runs.start_jax()
    run_dir = runs.open_run("ratio_study", c)
    agent, batch, rng = first_rollout(c)
    advantage, lines = np.asarray(ppo.normalized(batch.advantage)), []
    for epsilon in (c.CLIP_EPSILON, NO_CLIP):
        ratio = ratios_after(replace(c, CLIP_EPSILON=epsilon), agent, batch, rng)
        outside = (np.abs(ratio - 1) > c.CLIP_EPSILON).mean(axis=1)
        for passes, step in itertools.product(range(len(ratio)), range(0, ratio.shape[1], EVERY)):
            line = {
                "clip_epsilon": epsilon,
                "passes": passes,
                "share_outside": outside[passes],
                "step": step,
            }
            line["normalized_advantage"] = round(advantage[step].item(), 4)
            lines.append(line | {"ratio": round(ratio[passes, step].item(), 4)})
        shares = ", ".join(f"{share:.1%}" for share in outside)
        print(f"CLIP_EPSILON={epsilon:g}: outside the band after 0, 1, ... passes: {shares}")
    runs.write_csv(run_dir / "ratio_passes.csv", lines)
    print(f"everything of this study is in {run_dir}")


if __name__ == "__main__":
    settings.run(main)

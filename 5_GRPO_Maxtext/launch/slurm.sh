#!/bin/bash
# Folder 5's main script on two nodes under SLURM, one process each. In the repository's folder:
#
#     sbatch 5_GRPO_Maxtext/launch/slurm.sh NUM_BATCHES=20          # NAME=value is handed to the script
#     sbatch --ntasks=4 --time=8:00:00 5_GRPO_Maxtext/launch/slurm.sh MODEL=...
#
# sbatch's options override those below. A job that loses a task, or runs into its time limit, goes back into the
# queue and resumes from its last checkpoint: RUN_DIR is named after the job, whose number stays the same. The folder
# has to be on a disk that all nodes see.
#
# PYTHON        interpreter, the same path on every node (.venv/bin/python)
# MAX_RESTARTS  how often the job may go back (10), so that a broken job ends some day
#
# jax gives each of SLURM's tasks one GPU, the one with the task's number on its node. For a node with 8 GPUs use
# --gpus-per-node=8 --ntasks-per-node=8; --gpus-per-task would hide from task 3 the GPU it looks for.
#SBATCH --job-name=grpo
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
# append: otherwise a restart would overwrite the output. TERM: 300 s before the time limit all tasks are told to save
# after their step, so a step and a checkpoint have to fit into 300 s.

python=${PYTHON:-.venv/bin/python}
script=5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py
refuse() { echo "error: $1" >&2; exit 2; }
[ -n "$SLURM_JOB_ID" ] || refuse "no SLURM job; start this file with sbatch"
[ -f "$script" ] || refuse "no $script in $PWD; run sbatch in the folder of the repository"
[ -x "$python" ] || refuse "no $python in $PWD; run make setup first, or set PYTHON"

# With these set, jax would take the hosts from the shell that called sbatch instead of from SLURM.
unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID

# If one task is gone, the others may wait for it forever; --wait kills them after 60 s. Not --kill-on-bad-exit: it also
# kills a task that is about to exit with 2, and srun returns 143.
srun --wait=60 "$python" "$script" DISTRIBUTED=True RUN_DIR="runs/slurm_$SLURM_JOB_ID" "$@"
code=$?

[ $code = 0 ] || [ $code = 2 ] && exit $code  # 2: a setting that was refused will be refused again
[ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_RESTARTS:-10}" ] || exit $code
echo "exit code $code; putting job $SLURM_JOB_ID back into the queue; it resumes from its last checkpoint" >&2
scontrol requeue "$SLURM_JOB_ID"

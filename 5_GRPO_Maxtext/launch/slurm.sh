#!/bin/bash
# Folder 5's main script on two nodes under SLURM, one process each. In the repository's folder:
#
#     sbatch 5_GRPO_Maxtext/launch/slurm.sh NUM_BATCHES=20          # NAME=value is handed to the script
#     sbatch --ntasks=4 --time=8:00:00 5_GRPO_Maxtext/launch/slurm.sh MODEL=...
#
# Options of sbatch win over those below. A job that loses a task, or runs into its time limit, is put back into
# the queue and goes on from its last checkpoint: RUN_DIR is named after the job, whose number stays. The folder
# has to be on a disk that all nodes see.
#
# PYTHON        interpreter, the same path on every node (.venv/bin/python)
# MAX_RESTARTS  how often the job may be put back (10); a job that is broken has to end some day
#
# jax gives a task that SLURM started one GPU, the one with the task's number on its node. A node with 8 GPUs
# takes --gpus-per-node=8 --ntasks-per-node=8; --gpus-per-task would hide from task 3 the GPU it looks for.
#SBATCH --job-name=grpo
#SBATCH --ntasks=2
#SBATCH --ntasks-per-node=1
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --signal=TERM@300
# append: SLURM would begin the output anew with each restart. TERM: 300 s before the time limit all tasks are told
# to stop after their step and to save; a step and a checkpoint have to fit into that.

python=${PYTHON:-.venv/bin/python}
script=5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py
refuse() { echo "error: $1" >&2; exit 2; }
[ -n "$SLURM_JOB_ID" ] || refuse "no SLURM job; start this file with sbatch"
[ -f "$script" ] || refuse "no $script in $PWD; run sbatch in the folder of the repository"
[ -x "$python" ] || refuse "no $python in $PWD; run make setup first, or set PYTHON"

# With these jax would take the hosts from the shell that called sbatch, not from SLURM.
unset JAX_COORDINATOR_ADDRESS JAX_NUM_PROCESSES JAX_PROCESS_ID

# Where one task is gone the others may wait for it for ever: after 60 s they are killed. Not --kill-on-bad-exit: it
# kills the task that is about to end with 2, too, and srun returns 143.
srun --wait=60 "$python" "$script" DISTRIBUTED=True RUN_DIR="runs/slurm_$SLURM_JOB_ID" "$@"
code=$?

[ $code = 0 ] || [ $code = 2 ] && exit $code  # 2: what the script refuses it will refuse again
[ "${SLURM_RESTART_COUNT:-0}" -lt "${MAX_RESTARTS:-10}" ] || exit $code
echo "exit code $code; putting job $SLURM_JOB_ID back into the queue, to go on from its last checkpoint" >&2
scontrol requeue "$SLURM_JOB_ID"

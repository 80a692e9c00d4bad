#!/bin/bash
# Llama 3.1 8B on a TPU VM, from your own machine, with gcloud. In the repository's folder, one step after the other:
#
#     export PROJECT=my-project ZONE=us-east5-a TPU=v6e-8
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh create
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh state                   # until it says ACTIVE: from now on it costs money
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh copy
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh setup
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh run NUM_BATCHES=20      # NAME=value is handed to the script
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh log
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh delete                  # or it goes on costing money
#
# PROJECT, ZONE  of your Google Cloud account
# TPU            v6e-8 and v5p-8 are one host, generation by vLLM; a larger slice, as v5p-64, runs as several hosts
# NODE           name of the machine (grpo)
# BUCKET         gs://bucket/folder for checkpoints; several hosts need it, they share no disk
# HF_TOKEN_FILE  where `hf auth login` has put your token (~/.cache/huggingface/token)
#
# "run by us: no" beside a command: we have no TPU. gcloud 528.0.0 has accepted the options of each.
set -euo pipefail
refuse() { echo "error: $1" >&2; exit 2; }
step=${1:-}
shift || true
node=${NODE:-grpo}
course=(5_GRPO_Maxtext requirements/build.txt requirements/tpu.txt)
for name in PROJECT ZONE TPU; do [ -n "${!name:-}" ] || refuse "$name is not set; see the top of this file"; done
[ -f "${course[1]}" ] || refuse "no ${course[1]} in $PWD; start this in the folder of the repository"
command -v gcloud > /dev/null || refuse "no gcloud; install the Google Cloud CLI"
where=(--project="$PROJECT" --zone="$ZONE")

case $TPU in
  v6e-*) runtime=v2-alpha-tpuv6e ;;
  v5p-*) runtime=v2-alpha-tpuv5 ;;
  *) refuse "TPU=$TPU: use v6e-8, v5p-8 or a larger slice of these" ;;
esac
case $TPU in
  v6e-1 | v6e-4 | v6e-8 | v5p-8) hosts=() ;;
  *)
    hosts=(DISTRIBUTED=True ROLLOUT_ENGINE=maxtext CHECKPOINT_DIR="${BUCKET:-}")
    [ -n "${BUCKET:-}" ] || refuse "BUCKET is not set; the hosts of $TPU share no disk for their checkpoints"
    ;;
esac

everywhere() { gcloud compute tpus tpu-vm ssh "$node" "${where[@]}" --worker=all --command="$1"; }

case $step in
  create)  # run by us: no. --spot is the cheap kind that may be taken away; the run goes on from its checkpoint
    gcloud compute tpus queued-resources create "$node" "${where[@]}" --node-id="$node" \
      --accelerator-type="$TPU" --runtime-version="$runtime" --spot
    ;;
  state)  # run by us: no
    gcloud compute tpus queued-resources describe "$node" "${where[@]}" --format='value(state.state)'
    ;;
  copy)  # run by us: the first line. What git does not know stays here
    git archive --format=tar.gz --output=/tmp/course.tar.gz HEAD "${course[@]}"
    gcloud compute tpus tpu-vm scp /tmp/course.tar.gz "$node:" "${where[@]}" --worker=all
    gcloud compute tpus tpu-vm scp "${HF_TOKEN_FILE:-$HOME/.cache/huggingface/token}" "$node:token" \
      "${where[@]}" --worker=all
    ;;
  setup)  # run by us: the installation, on a CPU machine. The image brings Python 3.10; uv brings 3.12
    everywhere 'mkdir -p course && tar -C course -xzf course.tar.gz && cd course &&
      python3 -m pip install --quiet uv && python3 -m uv venv --python 3.12 .venv-vllm &&
      export VIRTUAL_ENV=$PWD/.venv-vllm &&
      python3 -m uv pip install --require-hashes -r requirements/build.txt &&
      python3 -m uv pip install --no-deps --require-hashes --no-build-isolation -r requirements/tpu.txt &&
      .venv-vllm/bin/python -c "import jax; print(len(jax.local_devices()))"'
    ;;
  run)  # run by us: no. nohup: a lost connection would end the run. The same step again goes on from the checkpoint
    printf -v constants '%q ' RUN_DIR=runs/grpo MODEL=meta-llama/Llama-3.1-8B-Instruct DATASET=gsm8k "${hosts[@]}" "$@"
    everywhere "cd course && HF_TOKEN=\$(cat ~/token) nohup .venv-vllm/bin/python \
      5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py $constants > run.log 2>&1 < /dev/null &"
    ;;
  log)  # run by us: no
    everywhere 'tail -n 20 course/run.log'
    ;;
  delete)  # run by us: no
    gcloud compute tpus queued-resources delete "$node" "${where[@]}" --force
    ;;
  *) refuse "'$step' is no step: create, state, copy, setup, run, log or delete" ;;
esac

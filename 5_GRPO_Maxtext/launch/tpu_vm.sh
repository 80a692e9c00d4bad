#!/bin/bash
# Llama 3.1 8B on a TPU VM, driven from your own machine with gcloud. Run this in the repository's folder;
# docs/operate/tpu.md walks through the first hour, with what each step prints and costs.
#
#     export PROJECT=my-project ZONE=us-east5-a TPU=v6e-8 BUCKET=gs://my-bucket/grpo
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh create
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh state        # wait for ACTIVE; from then on you pay
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh copy
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh setup
#     RUN=qwen bash 5_GRPO_Maxtext/launch/tpu_vm.sh run MODEL=Qwen/Qwen3-0.6B NUM_BATCHES=2
#     RUN=short bash 5_GRPO_Maxtext/launch/tpu_vm.sh run NUM_BATCHES=2
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh run          # NAME=value goes to the script
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh log
#     bash 5_GRPO_Maxtext/launch/tpu_vm.sh delete       # fetches the results first
#
# PROJECT, ZONE  of your Google Cloud account
# TPU            one host with vLLM: v6e-1, v6e-4, v6e-8, v5p-8. Larger slices, such as v5p-64, are several hosts
# NODE           name of the machine (grpo); results come to runs/NODE
# RUN            name of the run (grpo): RUN_DIR=runs/RUN, checkpoints in BUCKET/RUN
# BUCKET         gs://bucket/folder for what a run needs to resume. Without it the run dies with a spot machine;
#                several hosts must have it
# HF_TOKEN_FILE  where `hf auth login` put your token (~/.cache/huggingface/token)
#
# The machine was taken away? `delete --without-results`, then everything from `create` on: `run` resumes from BUCKET.
# Nobody here has a TPU: a test runs every step against a stand-in for gcloud, and none was run for real.
set -eo pipefail  # not -u: macOS's bash 3.2 takes an empty array for unset
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
    hosts=(DISTRIBUTED=True ROLLOUT_ENGINE=maxtext)
    [ -n "${BUCKET:-}" ] || refuse "BUCKET is not set; the hosts of $TPU share no disk for their checkpoints"
    ;;
esac

on() { gcloud compute tpus tpu-vm ssh "$node" "${where[@]}" --worker="$1" --command="$2"; }
send() { gcloud compute tpus tpu-vm scp "$1" "$node:$2" "${where[@]}" --worker=all; }
fetch() {  # reports and logs of all runs; without BUCKET their checkpoints, too
  mkdir -p "runs/$node" &&
    on 0 'tar -C course -czf results.tar.gz --exclude=runs/compiled runs run.log' &&
    gcloud compute tpus tpu-vm scp "$node:results.tar.gz" "runs/$node/" "${where[@]}" --worker=0 &&
    tar -C "runs/$node" -xzf "runs/$node/results.tar.gz" && rm "runs/$node/results.tar.gz"
}

case $step in
  create)  # --spot costs less, and Google may take the machine back at any time
    gcloud compute tpus queued-resources create "$node" "${where[@]}" --node-id="$node" \
      --accelerator-type="$TPU" --runtime-version="$runtime" --spot
    ;;
  state)
    gcloud compute tpus queued-resources describe "$node" "${where[@]}" --format='value(state.state)'
    ;;
  copy)  # the course as it is here, with your changes; the repository may be a ZIP without git
    archive=$(mktemp)
    trap 'rm "$archive"' EXIT
    tar -czf "$archive" --exclude=__pycache__ "${course[@]}"
    send "$archive" course.tar.gz
    send "${HF_TOKEN_FILE:-$HOME/.cache/huggingface/token}" token
    ;;
  setup)  # the image has Python 3.10; uv brings 3.12. Run on a CPU machine, with the same packages and options
    # shellcheck disable=SC2016  # the machine expands $PWD
    on all 'mkdir -p course && tar -C course -xzf course.tar.gz && cd course &&
      python3 -m pip install --quiet uv && python3 -m uv venv --python 3.12 .venv-vllm &&
      export VIRTUAL_ENV=$PWD/.venv-vllm &&
      python3 -m uv pip install --require-hashes -r requirements/build.txt &&
      python3 -m uv pip install --no-deps --require-hashes --no-build-isolation -r requirements/tpu.txt &&
      .venv-vllm/bin/python -c "import jax; print(len(jax.local_devices()))"'
    ;;
  run)  # setsid and the three redirections, of the whole group, let ssh return and the run live on
    printf -v words '%q ' RUN_DIR="runs/${RUN:-grpo}" ${BUCKET:+CHECKPOINT_DIR="$BUCKET"} \
      MODEL=meta-llama/Llama-3.1-8B-Instruct DATASET=gsm8k "${hosts[@]}" "$@"
    on all "{ cd course && HF_TOKEN=\$(cat ~/token) exec setsid .venv-vllm/bin/python \
      5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py $words; } >> course/run.log 2>&1 < /dev/null &"
    ;;
  log)
    on all 'tail -n 20 course/run.log'
    ;;
  fetch)
    fetch
    ;;
  delete)
    [ "${1:-}" = --without-results ] || fetch ||
      refuse "the results did not arrive, so nothing was deleted; try again, or delete --without-results"
    gcloud compute tpus queued-resources delete "$node" "${where[@]}" --force
    ;;
  *) refuse "'$step' is no step: create, state, copy, setup, run, log, fetch or delete" ;;
esac

#!/bin/bash
# Llama 3.1 8B on several hosts of a GKE cluster, from your own machine, with XPK. In the repository's folder:
#
#     python3 -m venv /tmp/xpk && /tmp/xpk/bin/pip install xpk==1.16.0      # run by us: yes
#     export PATH=/tmp/xpk/bin:$PATH PROJECT=my-project ZONE=us-east5-a TPU=v5p-64 BUCKET=gs://my-bucket/grpo
#     bash 5_GRPO_Maxtext/launch/gke_xpk.sh cluster --dry-run               # run by us: yes
#     bash 5_GRPO_Maxtext/launch/gke_xpk.sh cluster                         # from now on it costs money
#     bash 5_GRPO_Maxtext/launch/gke_xpk.sh workload TRAIN_MICRO_BATCH_SIZE=4
#     bash 5_GRPO_Maxtext/launch/gke_xpk.sh delete                          # or it goes on costing money
#
# KIND=pathways (unless set): one process drives the chips of all hosts, generation by vLLM. KIND=hosts: one process
# on each host, DISTRIBUTED=True, generation by MaxText. --dry-run prints what XPK would do, and changes nothing.
#
# PROJECT, ZONE  of your Google Cloud account
# TPU            such as v5p-64; its 32 chips share 16 sequences unless TRAIN_MICRO_BATCH_SIZE=4 is given
# BUCKET         gs://bucket/folder for checkpoints; a restarted pod has no other disk that lasts
# CLUSTER        name of the cluster (grpo)
# HF_TOKEN       your Hugging Face token
#
# "run by us: no" beside a command: only with --dry-run, as far as XPK 1.16.0 goes without an account.
set -euo pipefail
refuse() { echo "error: $1" >&2; exit 2; }
step=${1:-}
shift || true
for name in PROJECT ZONE TPU BUCKET; do [ -n "${!name:-}" ] || refuse "$name is not set; see the top of this file"; done
[ -f requirements/tpu.txt ] || refuse "no requirements/tpu.txt in $PWD; start this in the folder of the repository"
command -v xpk > /dev/null || refuse "no xpk; see the top of this file"
cluster=${CLUSTER:-grpo}
where=(--project="$PROJECT" --zone="$ZONE" --cluster="$cluster")
slice=(--tpu-type="$TPU" --num-slices=1)

dry=() constants=()
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then dry=(--dry-run); else constants+=("$argument"); fi
done
case ${KIND:-pathways} in
  pathways) suffix=-pathways hosts=() ;;  # XPK sets JAX_PLATFORMS=proxy and the proxy's address
  hosts) suffix='' hosts=(DISTRIBUTED=True ROLLOUT_ENGINE=maxtext) ;;
  *) refuse "KIND=$KIND: use pathways or hosts" ;;
esac

case $step in
  cluster)  # run by us: no
    xpk cluster "create$suffix" "${where[@]}" "${slice[@]}" --spot "${dry[@]}"
    ;;
  workload)  # run by us: no. The image is python:3.12 with what git knows of this folder; packages come at the start
    [ -n "${HF_TOKEN:-}" ] || refuse "HF_TOKEN is not set; see the top of this file"
    course=$(mktemp --directory)  # not this folder itself: .venv and runs/ would go into the image
    trap 'rm -r "$course"' EXIT
    git archive HEAD 5_GRPO_Maxtext requirements/build.txt requirements/tpu.txt | tar --extract --directory="$course"
    printf -v constants '%q ' RUN_DIR=runs/grpo CHECKPOINT_DIR="$BUCKET" \
      MODEL=meta-llama/Llama-3.1-8B-Instruct DATASET=gsm8k "${hosts[@]}" "${constants[@]}"
    xpk workload "create$suffix" "${where[@]}" "${slice[@]}" --workload=grpo --max-restarts=10 \
      --base-docker-image=python:3.12 --script-dir="$course" --env="HF_TOKEN=$HF_TOKEN" "${dry[@]}" \
      --command="pip install --quiet --require-hashes -r requirements/build.txt &&
        pip install --quiet --no-deps --require-hashes --no-build-isolation -r requirements/tpu.txt &&
        python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py $constants"
    ;;
  delete)  # run by us: no
    xpk cluster delete "${where[@]}" "${dry[@]}"
    ;;
  *) refuse "'$step' is no step: cluster, workload or delete" ;;
esac

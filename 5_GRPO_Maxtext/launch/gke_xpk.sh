#!/bin/bash
# Llama 3.1 8B on several hosts of a GKE cluster, from your own machine, with XPK. In the repository's folder:
#
#     python3 -m venv /tmp/xpk && /tmp/xpk/bin/pip install xpk==1.16.0
#     export PATH=/tmp/xpk/bin:$PATH PROJECT=my-project ZONE=us-east5-a TPU=v5p-64 BUCKET=gs://my-bucket/grpo
#     bash 5_GRPO_Maxtext/launch/gke_xpk.sh cluster --dry-run
#     bash 5_GRPO_Maxtext/launch/gke_xpk.sh cluster                         # from now on you pay
#     bash 5_GRPO_Maxtext/launch/gke_xpk.sh workload TRAIN_MICRO_BATCH_SIZE=4
#     bash 5_GRPO_Maxtext/launch/gke_xpk.sh fetch                           # reports and logs, into runs/CLUSTER
#     bash 5_GRPO_Maxtext/launch/gke_xpk.sh stop                            # the workload, not the cluster
#     bash 5_GRPO_Maxtext/launch/gke_xpk.sh delete                          # fetches first; until then you pay
#
# KIND=pathways (unless set): one process drives the chips of all hosts, and vLLM generates. It isn't restarted: XPK
# 1.16.0's Pathways template has no maxRestarts. `stop` and `workload` resume from BUCKET.
# KIND=hosts: one process per host (DISTRIBUTED=True), and MaxText generates. A lost pod restarts all of them, up to
# ten times; a setting that the script refuses (exit code 2) doesn't.
#
# PROJECT, ZONE  of your Google Cloud account
# TPU            such as v5p-64; its 32 chips need TRAIN_MICRO_BATCH_SIZE=4, or 16 sequences would not divide
# BUCKET         gs://bucket/folder for what a run needs to resume, and for reports; pods have no disk that lasts.
#                docs/operate/several_hosts.md names the roles that the nodes' account needs on it
# CLUSTER, RUN   names of the cluster and of the run (grpo)
# HF_TOKEN_FILE  where `hf auth login` put your token (~/.cache/huggingface/token). It goes to BUCKET/token, where the
#                pods read it, and `delete` removes it; in the workload itself everybody on the cluster could read it
# PATHWAYS_TAG   of Pathways' images; they must have been built for the jax of requirements/tpu.txt (jax-<its version>)
#
# --dry-run prints what XPK would do and changes nothing; that much was run. Nobody here has run more of it: a test
# runs every step against stand-ins for xpk and gcloud.
set -eo pipefail  # not -u: macOS's bash 3.2 takes an empty array for unset
refuse() { echo "error: $1" >&2; exit 2; }
step=${1:-}
shift || true
for name in PROJECT ZONE TPU BUCKET; do [ -n "${!name:-}" ] || refuse "$name is not set; see the top of this file"; done
[ -f requirements/tpu.txt ] || refuse "no requirements/tpu.txt in $PWD; start this in the folder of the repository"
command -v xpk > /dev/null || refuse "no xpk; see the top of this file"
cluster=${CLUSTER:-grpo} run=${RUN:-grpo} kind=${KIND:-pathways}
where=(--project="$PROJECT" --zone="$ZONE" --cluster="$cluster")
slice=(--tpu-type="$TPU" --num-slices=1)

dry=() constants=()
for argument in "$@"; do
  if [ "$argument" = --dry-run ]; then dry=(--dry-run); else constants+=("$argument"); fi
done
case $kind in
  pathways) suffix=-pathways hosts=() ;;  # XPK sets JAX_PLATFORMS=proxy and the proxy's address
  hosts) suffix='' hosts=(DISTRIBUTED=True ROLLOUT_ENGINE=maxtext) ;;
  *) refuse "KIND=$kind: use pathways or hosts" ;;
esac

images() {  # client and servers must have the same jax; XPK would take :latest
  local jax tag from=us-docker.pkg.dev/cloud-tpu-v2-images/pathways
  jax=$(sed -n 's/^jax==\([0-9.]*\).*/\1/p' requirements/tpu.txt)
  tag=${PATHWAYS_TAG:-jax-$jax}
  [[ $tag == *jax[-_]"$jax" ]] || refuse "PATHWAYS_TAG=$tag: requirements/tpu.txt has jax $jax; use an image of that"
  [ ${#dry[@]} != 0 ] || gcloud artifacts docker images describe "$from/server:$tag" > /dev/null ||
    refuse "no image $from/server:$tag; see gcloud artifacts docker tags list $from/server, or use KIND=hosts"
  # Unless told where, XPK has Pathways write to Google's own staging bucket.
  more=(--server-image="$from/server:$tag" --proxy-server-image="$from/proxy_server:$tag"
    --pathways-gcs-location="$BUCKET/pathways")
}
fetch() {
  mkdir -p "runs/$cluster" && gcloud storage rsync --recursive "$BUCKET/reports" "runs/$cluster" --project="$PROJECT"
}

case $step in
  cluster)
    xpk cluster "create$suffix" "${where[@]}" "${slice[@]}" --spot "${dry[@]}"
    ;;
  workload)  # the image is python:3.12 with this folder's course; the packages come at the start
    # 600 s between SIGTERM and SIGKILL, for a step and a checkpoint; a spot machine that's taken back has 25
    more=(--max-restarts=10 --termination-grace-period-seconds=600)
    if [ "$kind" = pathways ]; then images; fi
    course=$(mktemp -d)  # not this folder itself: .venv and runs/ would go into the image
    trap 'rm -r "$course"' EXIT
    tar --create --exclude=__pycache__ 5_GRPO_Maxtext requirements/build.txt requirements/tpu.txt |
      tar --extract --directory="$course"
    token=${HF_TOKEN_FILE:-$HOME/.cache/huggingface/token}
    [ ${#dry[@]} != 0 ] || gcloud storage cp "$token" "$BUCKET/token" --project="$PROJECT" ||
      refuse "$token did not get to $BUCKET/token; run \`hf auth login\`, or set HF_TOKEN_FILE"
    # One line, because XPK puts it into YAML as it is; exec, because XPK signals the shell that runs it.
    printf -v words '%q ' "$BUCKET" "$run" MODEL=meta-llama/Llama-3.1-8B-Instruct DATASET=gsm8k "${hosts[@]}" \
      "${constants[@]}"
    xpk workload "create$suffix" "${where[@]}" "${slice[@]}" --workload="$run" "${more[@]}" \
      --base-docker-image=python:3.12 --script-dir="$course" "${dry[@]}" \
      --command="exec bash 5_GRPO_Maxtext/launch/pod.sh $words"
    ;;
  fetch)
    fetch
    ;;
  stop)
    xpk workload delete "${where[@]}" --workload="$run" "${dry[@]}"
    ;;
  delete)
    [ "${1:-}" = --without-results ] || [ ${#dry[@]} != 0 ] || fetch ||
      refuse "the results did not arrive, so nothing was deleted; try again, or delete --without-results"
    [ ${#dry[@]} != 0 ] || gcloud storage rm "$BUCKET/token" --project="$PROJECT" || true  # maybe there's none
    xpk cluster delete "${where[@]}" "${dry[@]}"
    ;;
  *) refuse "'$step' is no step: cluster, workload, fetch, stop or delete" ;;
esac

#!/bin/bash
# What a pod runs. gke_xpk.sh starts it, with the bucket, the name of the run, and the main script's NAME=value.
#
# Kubernetes ends a pod with SIGTERM, and XPK's wrapper sends that to this shell alone. The trap hands it on to Python,
# which finishes its step and saves. Then the report goes to the bucket, because the pod's disk doesn't last.
refuse() { echo "error: $1" >&2; exit 2; }
[ -n "$KUBERNETES_SERVICE_HOST" ] || refuse "no pod; start gke_xpk.sh, this would install packages on your machine"
bucket=$1 run=$2
shift 2
pip install --quiet --require-hashes -r requirements/build.txt || exit 1
pip install --quiet --no-deps --require-hashes --no-build-isolation -r requirements/tpu.txt || exit 1

read_token="import gcsfs; print(gcsfs.GCSFileSystem().cat('$bucket/token').decode())"
HF_TOKEN=$(python -c "$read_token") || exit 1
export HF_TOKEN

python 5_GRPO_Maxtext/grpo_llama3_1_8b_demo.py RUN_DIR="runs/$run" CHECKPOINT_DIR="$bucket" "$@" &
script=$!
trap 'kill -TERM $script' TERM
wait $script
code=$?
while kill -0 $script 2> /dev/null; do  # the signal has ended `wait`, and Python is saving
  wait $script
  code=$?
done
python -c "import gcsfs; gcsfs.GCSFileSystem().put('runs/$run/', '$bucket/reports/$run/', recursive=True)"
exit $code

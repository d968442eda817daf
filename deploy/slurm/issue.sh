#!/bin/bash
# Issues the certificates of a job of train-certificates.sbatch. Run it where the authority's key is.
#
#   issue.sh SEALRING CA EXCHANGE SLURM_JOB_ID WORLD_SIZE
#
# CA            the authority's folder (sealring ca init)
# EXCHANGE      the folder that was given to sbatch
# WORLD_SIZE    the number of workers of the whole job
set -euo pipefail
if (($# != 5)); then
  echo "usage: issue.sh SEALRING CA EXCHANGE SLURM_JOB_ID WORLD_SIZE" >&2
  exit 2
fi
sealring=$1 ca=$2 exchange=$3 job=sealring-$4 world=$5

echo "waiting for $world requests in $exchange"
for ((rank = 0; rank < world; rank++)); do
  until [ -e "$exchange/$job-rank-$rank.csr" ]; do sleep 0.5; done
done
"$sealring" ca issue --ca "$ca" --job "$job" --rank "0-$((world - 1))" --world-size "$world" \
  --request "$exchange/$job-rank-{rank}.csr" --out "$exchange"
touch "$exchange/$job.issued"

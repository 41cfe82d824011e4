#!/usr/bin/env bash
# Start one task of a cluster: ./launch_worker.sh CLUSTER_JSON TASK_INDEX [OPTION …]; --help lists the options.
# Task 0 is the master and a worker, the others are workers; start them in any order.
# SIGTERM, and a --preemption-notice, let what runs end and clients save (--drain-timeout); a second SIGTERM ends at once.
# Exit codes: 0 ended as asked, 1 an error that a person has to mend (one line says which), 2 wrong arguments,
# 75 it gave up on others and may be started again, 130 Ctrl-C. Kubernetes: give terminationGracePeriodSeconds more than
# --drain-timeout; systemd: TimeoutStopSec, with Restart=always and RestartPreventExitStatus=1 2 (deploy/).
set -euo pipefail

here="$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")" && pwd)"

usage() {
  echo "usage: launch_worker.sh CLUSTER_JSON TASK_INDEX [OPTION …], see --help" >&2
  exit 2
}

case "${1:-}" in
  -h | --help) ;;
  *)
    [[ $# -ge 2 ]] || usage
    [[ "$2" =~ ^[0-9]+$ ]] || { echo "launch_worker.sh: TASK_INDEX must be a number, not '$2'" >&2; usage; }
    ;;
esac

python="$here/.venv/bin/python"
if [[ ! -x "$python" ]]; then
  python="$(command -v python3)" || { echo "launch_worker.sh: no python3; run make setup first" >&2; exit 1; }
  export PYTHONPATH="$here${PYTHONPATH:+:$PYTHONPATH}"
fi
exec "$python" -m shardwright.server "$@"

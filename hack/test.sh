#!/usr/bin/env bash
# test.sh: the test suite in lanes, cheapest first. FULL=1 adds the fault matrices and soaks.
set -euo pipefail
cd "$(dirname "$0")/.."
[ -n "${HOME:-}" ] || { unset HOME; HOME=~; export HOME; }
pytest=(.venv/bin/python -m pytest -p no:cacheprovider -q --maxfail=10)  # behind one cause, tests that wait for a dead engine could go on for hours
if [ -n "${FULL:-}" ]; then full=""; else full=" and not full"; fi
lane() {
  local name=$1 started=$SECONDS; shift
  echo "== $name"
  local code=0; "${pytest[@]}" "$@" || code=$?
  # 5 = nothing selected in this lane; anything else is a failure
  [ $code -eq 0 ] || [ $code -eq 5 ] || { echo "== $name failed after $((SECONDS - started)) s" >&2; exit $code; }
  echo "== $name: $((SECONDS - started)) s"
}
# A lane beside the others: what it prints is kept together and shown when it is waited for.
beside=""
beside() { beside=build/test-beside.log; mkdir -p build; echo "== $1, beside what follows"; (lane "$@") >"$beside" 2>&1 & beside_pid=$!; }
join() { local code=0; wait "$beside_pid" || code=$?; cat "$beside"; beside=""; [ $code -eq 0 ] || exit $code; }
cluster() { .venv/bin/python -m tests.support.cluster "$@" --name modelswap-test; }
ended() {
  if [ -n "$beside" ]; then pkill -TERM -P "$beside_pid" 2>/dev/null || true; wait "$beside_pid" 2>/dev/null || true; cat "$beside"; fi
  [ -z "${clustered:-}" ] || [ -n "${MODELSWAP_KEEP:-}" ] || cluster down
}
trap ended EXIT
# What lanes drive is built before them and not by the first test that asks: cold, this takes minutes, and its progress should be seen.
hack/kind/tools.sh helm
hack/servers/build.sh
[ -z "${FULL:-}" ] || { hack/promtool/build.sh; hack/certmanager/build.sh; }
lane "fast: unit, property, attacks, contract" -n 2 -m "not model and not api and not cluster and not engine and not sources$full" tests
[ -z "${FULL:-}" ] || lane "fast, with everything late by chance" -p tests.support.late -n 2 -m "not model and not api and not cluster and not engine and not sources and not full" tests
lane "sources: real servers, with faults" -n 2 --dist loadfile -m "sources and not model and not cluster and not engine$full" tests
lane "model: real worker processes, tiny models" -n 2 --dist loadfile -m "model and not cluster$full" tests
hack/engines/vllm.sh >/dev/null; hack/engines/sglang.sh >/dev/null
lane "engine: the real vLLM and SGLang on CPU" -n 2 --dist loadfile -m "engine and not cluster$full" tests
[ -n "${KUBEBUILDER_ASSETS:-}" ] || hack/kind/kube-binaries.sh etcd kube-apiserver kube-controller-manager kubectl
hack/gitops/build.sh source-controller kustomize-controller flux-verdict ${FULL:+argocd}
# One cluster and one port for all checkouts of a machine: the lane of a second run waits for that of the first.
exec 8>"${MODELSWAP_CACHE:-$HOME/.cache/modelswap}/kind/test-lane.lock"
if command -v flock >/dev/null; then flock -n 8 || { echo "== waiting for the cluster of another test run"; flock 8; }; fi
clustered=1
[ -n "${MODELSWAP_KEEP:-}" ] || cluster down   # what a killed run left is not to be built upon
cluster up --port 18081
hack/images/site.sh
beside "api: bare API server" -m "api and not cluster$full" tests   # it mostly waits, as the next one does
lane "cluster: kind" -m "cluster$full" tests
join

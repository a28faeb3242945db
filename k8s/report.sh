#!/bin/sh
# What a cluster makes of warmroute, as one text to send back: k8s/report.sh [NAMESPACE] > report.txt
# It reads, and asks the API server what it would do with each overlay; nothing is created or changed, and no secret is read.
namespace=${1:-warmroute}
kubectl="kubectl --request-timeout=20s"

part() {
	printf '\n== %s\n' "$*"
	"$@" 2>&1 || echo "(exit status $?)"
}

echo "warmroute in the namespace $namespace, $(date -u +%Y-%m-%dT%H:%MZ)"
if ! $kubectl version; then
	echo "no cluster answers: set KUBECONFIG, or choose a context with kubectl config use-context" >&2
	exit 1
fi
part $kubectl get nodes -o wide
part $kubectl api-resources --api-group=ray.io
part $kubectl api-resources --api-group=inference.networking.k8s.io
part $kubectl api-resources --api-group=gateway.networking.k8s.io
for overlay in "$(dirname "$0")"/overlays/*/; do
	part $kubectl apply --dry-run=server --namespace="$namespace" -k "$overlay"
done
part $kubectl -n "$namespace" get deployments,statefulsets,pods,services,endpointslices,networkpolicies,hpa -o wide
part $kubectl -n "$namespace" get events --sort-by=.lastTimestamp
for pod in $($kubectl -n "$namespace" get pods -l app.kubernetes.io/name=warmroute -o name 2>/dev/null); do
	part $kubectl -n "$namespace" describe "$pod"
	part $kubectl -n "$namespace" logs --all-containers --tail=200 "$pod"
done
path="/api/v1/namespaces/$namespace/services/warmroute-router:http/proxy"
for route in health replicas metrics; do
	part $kubectl get --raw "$path/$route"
done

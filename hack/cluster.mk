# The cluster for tests and demo, and the images; CLUSTER and PORT choose another one than the demo's.
CLUSTER ?= modelswap
PORT ?= 18080

.PHONY: kube-binaries cluster-up cluster-down cluster-status image-operator image-engine image-engine-full image-sidecar

kube-binaries: ## build Kubernetes' own programs from Go modules (cached)
	@hack/kind/kube-binaries.sh

cluster-up: env ## start the kind cluster (or find it running)
	@$(PY) -m tests.support.cluster up --name $(CLUSTER) --port $(PORT)

cluster-down: env ## remove every cluster made here, and the Docker engine if it was started here
	@$(PY) -m tests.support.cluster down --all

cluster-status: env ## list the clusters made here
	@$(PY) -m tests.support.cluster status

image-operator: env ## build the operator's image
	@hack/kind/dockerd.sh start && hack/images/build.sh operator

image-engine: env ## build the engine's image without torch and transformers, which are mounted
	@hack/kind/dockerd.sh start && hack/images/build.sh engine

image-engine-full: env ## build the complete engine image (about 6 GB)
	@hack/kind/dockerd.sh start && hack/images/build.sh engine-full

image-sidecar: env ## build the image of the sidecar before vLLM or SGLang (no torch)
	@hack/kind/dockerd.sh start && hack/images/build.sh sidecar

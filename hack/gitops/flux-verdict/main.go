// flux-verdict prints what Flux makes of objects: by their conditions alone (kstatus), and by healthCheckExprs.
//
// It calls what kustomize-controller calls. Standard input: {"exprs": {KIND: {...}}, "objects": [...]}; standard output:
// one [KSTATUS, EXPRS] for each object.
package main

import (
	"context"
	"encoding/json"
	"log"
	"os"

	"github.com/fluxcd/cli-utils/pkg/kstatus/status"
	"github.com/fluxcd/pkg/apis/kustomize"
	"github.com/fluxcd/pkg/runtime/cel"
	"k8s.io/apimachinery/pkg/apis/meta/v1/unstructured"
)

type question struct {
	Exprs   map[string]kustomize.HealthCheckExpressions `json:"exprs"`
	Objects []*unstructured.Unstructured                `json:"objects"`
}

func byConditions(object *unstructured.Unstructured) string {
	found, err := status.Compute(object)
	if err != nil {
		return "error: " + err.Error()
	}
	return found.Status.String()
}

func byExprs(object *unstructured.Unstructured, exprs kustomize.HealthCheckExpressions) string {
	evaluator, err := cel.NewStatusEvaluator(&exprs)
	if err != nil {
		return "error: " + err.Error()
	}
	found, err := evaluator.Evaluate(context.Background(), object)
	if err != nil {
		return "error: " + err.Error()
	}
	return found.Status.String()
}

func main() {
	var asked question
	if err := json.NewDecoder(os.Stdin).Decode(&asked); err != nil {
		log.Fatal(err)
	}
	answers := [][2]string{}
	for _, object := range asked.Objects {
		answers = append(answers, [2]string{byConditions(object), byExprs(object, asked.Exprs[object.GetKind()])})
	}
	if err := json.NewEncoder(os.Stdout).Encode(answers); err != nil {
		log.Fatal(err)
	}
}

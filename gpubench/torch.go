package gpubench

import (
	"bytes"
	"context"
	_ "embed" // maxautotune.py
	"encoding/json"
	"fmt"
	"os/exec"
	"strings"
)

//go:embed maxautotune.py
var torchScript string

// A torchCase is an operation for maxautotune.py; one without a kind is left out.
type torchCase struct {
	Kind    string `json:"kind"`
	M       int64  `json:"m,omitempty"`
	N       int64  `json:"n,omitempty"`
	K       int64  `json:"k,omitempty"`
	Seq     int64  `json:"seq,omitempty"`
	Hidden  int64  `json:"hidden,omitempty"`
	Heads   int64  `json:"heads,omitempty"`
	KVHeads int64  `json:"kv_heads,omitempty"`
	Head    int64  `json:"head,omitempty"`
	MLP     int64  `json:"mlp,omitempty"`
	Experts int64  `json:"experts,omitempty"`
	Top     int64  `json:"top,omitempty"`
}

// torchTimes measures cases by torch.compile. It gives seconds, 0 where torch has no such case, and
// torch's version or why it has not run.
func torchTimes(ctx context.Context, python, device string, list []torchCase) ([]float64, string) {
	if python == "" {
		return nil, "not asked for: --torch PYTHON"
	}
	order, err := json.Marshal(map[string]any{"device": device, "cases": list})
	if err != nil {
		return nil, err.Error()
	}
	cmd := exec.CommandContext(ctx, python, "-c", torchScript)
	cmd.Stdin = bytes.NewReader(order)
	var errors bytes.Buffer
	cmd.Stderr = &errors
	out, err := cmd.Output()
	var answer struct {
		Version string
		Why     string
		Seconds []float64
	}
	if err == nil {
		err = json.Unmarshal(out, &answer)
	}
	switch {
	case err != nil:
		lines := strings.Split(strings.TrimSpace(errors.String()), "\n")
		return nil, fmt.Sprintf("%s: %v: %s", python, err, lines[len(lines)-1])
	case answer.Why != "":
		return nil, answer.Why
	}
	return answer.Seconds, "torch " + answer.Version
}

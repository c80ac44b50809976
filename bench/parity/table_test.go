package main

import (
	"os"
	"path/filepath"
	"strings"
	"testing"
)

func TestTable(t *testing.T) {
	const result = `{"parameters": 2021376, "branch": true, "from": 500, "pairs": 2, "steps": 120,
"rate": 1e-3, "null": {"gaps": [0.001, -0.001], "mean": 0, "limits": {"lower": -0.006, "upper": 0.006}},
"formats": [{"name": "nvfp4", "gaps": [0.1, 0.2], "mean": 0.15, "sd": 0.07, "bound": 0.25,
"limits": {"lower": -0.1, "upper": 0.4}, "verdict": "not resolved"},
{"name": "all4", "gaps": [0.3], "mean": 0.3, "bound": 0.25, "verdict": "not resolved"}]}`
	path := filepath.Join(t.TempDir(), "r.json")
	if err := os.WriteFile(path, []byte(result), 0o666); err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	if err := table(&b, []string{path}); err != nil {
		t.Fatal(err)
	}
	for _, want := range []string{
		"| 2.02M, branch, 120 steps from step 500, rate 0.001 to 0 | null | **0.000** (+0.001, −0.001) |",
		"|  | NVFP4 | **+0.150** (+0.100, +0.200) | 0.070 | −0.100 … +0.400 | 0.25 | not resolved |",
		"|  | all FP4 | **+0.300** (+0.300) |  |  | 0.25 | not resolved |",
		"|  | all FP4 against NVFP4 | **+0.200** (+0.200) |",
	} {
		if !strings.Contains(b.String(), want) {
			t.Errorf("the table lacks\n%s\n%s", want, &b)
		}
	}
	if err := table(&b, []string{path + "x"}); err == nil {
		t.Error("a file that is not there has rows")
	}
}

package main

import (
	"path/filepath"
	"testing"

	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/internal/slowtest"
)

// What ptxas makes of each kernel is the committed table, and no register is spilled.
func TestTable(t *testing.T) {
	slowtest.Only(t)
	rows, err := measure(t.Context(), []string{"b200", "gb300", "rtx6000pro"}, "")
	if err != nil {
		t.Fatal(err)
	}
	for _, r := range rows {
		if r.spills > 0 {
			t.Errorf("%s for %s spills %d bytes", r.kernel, r.target, r.spills)
		}
	}
	golden.Compare(t, filepath.Join("..", "..", "kernels", "fused", "table.csv"), table(rows))
}

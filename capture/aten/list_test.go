package aten

import (
	"fmt"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/golden"
)

// docs/operators.md lists the operators that have a rule.
func TestOperatorsAreListed(t *testing.T) {
	var out strings.Builder
	fmt.Fprint(&out, `# Operators of captured programs

Programs that `+"`torch.export`"+` saved, and modules of `+"`optimize`"+`, may call these operators of ATen, and the
same in place (`+"`add_`"+` for `+"`add`"+`). [capture.md](capture.md) says what else is asked of a program. Forms that the
graph cannot say are refused by name, with the module and the line; so is every operator that is not here: sorting,
convolutions other than of patches, recurrent cells, Fourier transforms, complex numbers, bits of whole numbers,
random numbers other than dropout, and results whose size depends on values.

`+"`topk`"+` gives the first of equal elements first, where PyTorch leaves the order open. Of values that are put at one
place the last stays (`+"`index_put`, `index_copy`, `scatter`"+`). The CPU engine takes subnormal numbers as 0.

`+"`go test ./capture/aten -run TestOperatorsAreListed -update`"+` writes this file.

| group | operators |
|---|---|
`)
	for _, g := range groups() {
		names := map[string]bool{}
		for target := range g.rules {
			name, _, _ := strings.Cut(strings.TrimPrefix(target, "aten."), ".")
			if strings.HasPrefix(target, "aten.") {
				names[name] = true
			}
		}
		var list []string
		for n := range names {
			list = append(list, "`"+n+"`")
		}
		slices.Sort(list)
		fmt.Fprintf(&out, "| %s | %s |\n", g.name, strings.Join(list, ", "))
	}
	golden.Compare(t, "../../docs/operators.md", []byte(out.String()))
}

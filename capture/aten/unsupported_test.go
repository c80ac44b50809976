package aten

import (
	"fmt"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/capture/pt2"
	"github.com/deepwell/deepwell/internal/golden"
)

// unsupported are programs with something that is not supported. Each gives one message, which lists
// every call that is missing, with its module and its line.
var unsupportedModels = []string{"no_convolution", "no_recurrent", "no_fourier", "no_polar",
	"no_sorted", "no_branch", "no_product", "no_custom", "no_quantized", "no_noisy", "no_found",
	"no_remembering"}

func TestUnsupportedModels(t *testing.T) {
	var out strings.Builder
	for _, name := range unsupportedModels {
		archive, err := pt2.Parse(name, unpack(t, name+".pt2.gz"))
		if err != nil {
			t.Fatal(err)
		}
		if _, err = New(archive); err == nil {
			t.Errorf("%s is supported", name)
		}
		fmt.Fprintf(&out, "%s: %v\n\n", name, err)
	}
	golden.Compare(t, "testdata/unsupported.txt", []byte(out.String()))
}

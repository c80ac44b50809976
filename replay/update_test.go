package replay

import (
	"bytes"
	"flag"
	"fmt"
	"os"
	"testing"

	"github.com/deepwell/deepwell/internal/slowtest"
)

var replayCensus = flag.String("replay.census", "",
	"only compile the programs, and write what each is made of to this file")

// TestCensusOfSelection writes "PROGRAM: LINE" for each line of each program's census. Two files
// from two plugins tell what an update changes (bench/pluginupdate).
func TestCensusOfSelection(t *testing.T) {
	slowtest.Only(t)
	if *replayCensus == "" {
		t.Skip("there is no -replay.census")
	}
	r := runner(t)
	var text bytes.Buffer
	for _, d := range selected(t) {
		format, code, err := r.Compile(t.Context(), d.pair.GPU, d.pair.Cluster)
		if err != nil {
			t.Errorf("%s: %v", d, err)
			continue
		}
		census, err := CensusOf(format, code, d.pair.GPU.Mesh)
		if err != nil {
			t.Errorf("%s: %v", d, err)
		}
		for _, line := range census {
			fmt.Fprintf(&text, "%s: %s\n", d, line)
		}
	}
	if err := os.WriteFile(*replayCensus, text.Bytes(), 0o644); err != nil {
		t.Fatal(err)
	}
}

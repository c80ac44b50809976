package main

import (
	"bytes"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/program"
	"github.com/deepwell/deepwell/step"
)

// Ranks that hold the same stand once.
func TestRanksThatHoldTheSame(t *testing.T) {
	var b bytes.Buffer
	var list []*step.Footprint
	for rank, state := range []int64{5, 7, 7, 7, 5} {
		list = append(list, &step.Footprint{Rank: rank,
			Memory: program.Memory{Optimizer: state}, Largest: "x"})
	}
	printRanks(&b, list)
	if n := strings.Count(b.String(), "\nrank "); n != 2 || !strings.Contains(b.String(), "ranks 2 to 3") {
		t.Errorf("%s", b.String())
	}
}

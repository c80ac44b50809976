package deepwell

import (
	"errors"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dryrun"
)

func TestBatchInSequences(t *testing.T) {
	for b, want := range map[Batch][2]int64{
		{}: {0, 0}, {Sequences: 512}: {512, 0}, {Tokens: 4 << 20}: {512, 0},
		{Tokens: 16 << 20, AtMost: true}: {0, 2048}, {Sequences: 100, AtMost: true}: {0, 100},
		{Tokens: 8193, AtMost: true}: {0, 1},
	} {
		n, most, err := b.in(8192)
		if err != nil || n != want[0] || most != want[1] {
			t.Errorf("%+v is %d sequences, %d at most, %v", b, n, most, err)
		}
	}
	for _, b := range []Batch{{Tokens: 100}, {Tokens: 8193}, {Tokens: 1, AtMost: true}, {Sequences: -1}} {
		if _, _, err := b.in(8192); !errors.Is(err, diag.BadUsage) {
			t.Errorf("%+v: %v", b, err)
		}
	}
}

// The waterfall ends at the simulated step.
func TestSettle(t *testing.T) {
	parts := settle([]dryrun.Part{{Name: "attention", Seconds: 2}, {Name: "bubble", Seconds: 1}}, 3.5)
	if parts[1].Seconds != 1.5 {
		t.Errorf("%v", parts)
	}
}

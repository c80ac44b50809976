package estimate

import (
	"math"
	"testing"

	"github.com/deepwell/deepwell/plan"
)

// attentionOf is the seconds of attention of a plan with that cp, over the same tokens.
func attentionOf(t *testing.T, profile string, cp plan.CP) float64 {
	p := base()
	p.FSDP.Size = 8 / cp.Size
	p.CP, p.PP = cp, plan.PP{Size: 1, Schedule: "1f1b"}
	p.Batch, p.Microbatches = 64, 8 // so that a device has as many tokens at a time
	p.Cluster = "32xb200"
	return mustPrice(t, estimator(t, "llama3.1-70b", p.Cluster, profile), p).Parts.Attention
}

// Context-parallel plans of our own stack are priced as they compile: gathered attention writes its
// scores; a ring in sequence order calls cuDNN with every chunk in full, so that each device does
// the work of the last one; a zigzag ring calls it with what is seen.
func TestContextParallelIsPricedAsItCompiles(t *testing.T) {
	whole := attentionOf(t, "deepwell", plan.CP{Size: 1, Kind: "gather"})
	for _, balance := range []bool{false, true} {
		if got := attentionOf(t, "deepwell", plan.CP{Size: 8, Kind: "gather", Balance: balance}); got < 3*whole {
			t.Errorf("gathered, balance %v: %.3g s, whole sequences %.3g s", balance, got, whole)
		}
	}
	ring := attentionOf(t, "deepwell", plan.CP{Size: 8, Kind: "ring"})
	if got, want := ring/whole, 15.0/8; math.Abs(got/want-1) > 0.01 {
		t.Errorf("a ring has %.3f times the attention of whole sequences, want %.3f", got, want)
	}
	zigzag := attentionOf(t, "deepwell", plan.CP{Size: 8, Kind: "ring", Balance: true})
	if got := zigzag / whole; math.Abs(got-1) > 0.01 {
		t.Errorf("a zigzag ring has %.3f times the attention of whole sequences", got)
	}
	for _, cp := range []plan.CP{{Size: 8, Kind: "a2a"}, {Size: 8, Kind: "a2a+ring", Inner: 4, Balance: true}} {
		if got := attentionOf(t, "deepwell", cp) / whole; math.Abs(got-1) > 0.01 {
			t.Errorf("%+v has %.3f times the attention of whole sequences", cp, got)
		}
	}
}

// Other stacks skip masked chunks: balanced chunks have the mean work, and in sequence order the
// last has 2-1/cp times as much.
func TestBalanceIsRead(t *testing.T) {
	for _, profile := range []string{"megatron", "megatron-26.04", "torchtitan", "maxtext"} {
		for _, kind := range []string{"gather", "ring"} {
			for _, cp := range []int64{2, 8} {
				even := attentionOf(t, profile, plan.CP{Size: cp, Kind: kind, Balance: true})
				last := attentionOf(t, profile, plan.CP{Size: cp, Kind: kind})
				if got, want := last/even, 2-1/float64(cp); math.Abs(got-want) > 1e-3 {
					t.Errorf("%s, %s of %d: %.4f times the balanced attention, want %.4f", profile, kind, cp, got, want)
				}
			}
		}
	}
	if got := lastKeys(8192, 1024, 2048); got != 1024 {
		t.Errorf("the last chunk sees %v keys of a window of 1024", got)
	}
}

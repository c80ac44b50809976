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

// Context-parallel plans of our own stack are priced as they compile: in sequence order each device
// of a ring calls cuDNN with every chunk in full, and the last one sees all gathered keys; balanced
// chunks have what is seen.
func TestContextParallelIsPricedAsItCompiles(t *testing.T) {
	whole := attentionOf(t, "deepwell", plan.CP{Size: 1, Kind: "gather"})
	for _, kind := range []string{"gather", "ring"} {
		for balance, want := range map[bool]float64{false: 15.0 / 8, true: 1} {
			got := attentionOf(t, "deepwell", plan.CP{Size: 8, Kind: kind, Balance: balance})
			if got /= whole; math.Abs(got/want-1) > 0.01 {
				t.Errorf("%s, balance %v: %.3f times the attention of whole sequences, want %.3f", kind,
					balance, got, want)
			}
		}
	}
	for _, cp := range []plan.CP{{Size: 8, Kind: "a2a"}, {Size: 8, Kind: "a2a+ring", Inner: 4, Balance: true}} {
		if got := attentionOf(t, "deepwell", cp) / whole; math.Abs(got-1) > 0.01 {
			t.Errorf("%+v has %.3f times the attention of whole sequences", cp, got)
		}
	}
}

// Layers with a window compute what it holds and send its halo, whatever the kind and however long
// the sequence is; a window that begins before the previous chunk is attention that writes scores.
func TestWindowsArePricedAsTheyCompile(t *testing.T) {
	parts := func(cp plan.CP, seq int64) Parts {
		p := base()
		p.FSDP.Size, p.CP, p.PP = 8/cp.Size, cp, plan.PP{Size: 1, Schedule: "1f1b"}
		p.Seq, p.Batch, p.Microbatches, p.Cluster = seq, 64, 8, "32xb200"
		return mustPrice(t, estimator(t, "mistral-7b-v0.1", p.Cluster, "deepwell"), p).Parts
	}
	ring := plan.CP{Size: 4, Kind: "ring", Balance: true}
	gather := ring
	gather.Kind = "gather"
	one := parts(ring, 32768)
	if other := parts(gather, 32768); other.Attention != one.Attention {
		t.Errorf("the attention of a window: %.3g s, gathered %.3g s", one.Attention, other.Attention)
	}
	two := parts(ring, 65536)
	if got := two.Attention / one.Attention; got < 1.8 || got > 2.1 {
		t.Errorf("twice the tokens have %.2f times the attention of a window", got)
	}
	if two.Context > 1.5*one.Context {
		t.Errorf("halos of a sequence twice as long take %.3g s instead of %.3g s", two.Context, one.Context)
	}
	if short := parts(ring, 16384); short.Attention < one.Attention {
		t.Errorf("a window longer than a chunk takes %.3g s, a shorter one %.3g s", short.Attention,
			one.Attention)
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

// A model has the layers of all its loops: gemma3-1b has 4 turns of 6 layers, of which one sees
// the whole sequence, and 2 layers behind them. As many tokens in longer sequences are more work.
func TestLayersOfAllLoopsArePriced(t *testing.T) {
	attention := func(seq int64) (attention, linear float64) {
		p := base()
		p.TP, p.FSDP.Size, p.PP = plan.TP{Size: 1}, 8, plan.PP{Size: 1, Schedule: "1f1b"}
		p.Seq, p.Batch, p.Microbatches, p.Cluster = seq, 8<<17/seq, 1, "8xb200"
		parts := mustPrice(t, estimator(t, "gemma3-1b", p.Cluster, "deepwell"), p).Parts
		return parts.Attention, parts.Compute
	}
	short, gemms := attention(1 << 14)
	long, same := attention(1 << 17)
	if gemms != same || long < 4*short {
		t.Errorf("attention takes %.3g s of 16k and %.3g s of 131k, linear layers %.3g and %.3g", short,
			long, gemms, same)
	}
}

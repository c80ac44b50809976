package kernels_test

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/kernels"
)

// mixtral is the first GEMM of Mixtral's experts for 8,192 tokens a device, two experts a token,
// slots for 1.5 times the mean load.
func mixtral(change func(*kernels.Grouping)) kernels.Grouping {
	g := kernels.Grouping{Experts: 8, Slots: 3072, Out: 14336, In: 4096, Tokens: 16384, Parts: 1,
		Elem: dtype.BF16}
	change(&g)
	return g
}

// deepseek is the first GEMM of DeepSeek-V3's experts, of which a device of 64 has 4, with slots
// from all 64: a half batch of 4,096 tokens of each.
func deepseek(change func(*kernels.Grouping)) kernels.Grouping {
	g := kernels.Grouping{Experts: 4, Slots: 64 * 192, Out: 2048, In: 7168, Tokens: 4 * 64 * 128,
		Parts: 64, Elem: dtype.BF16, Format: dtype.MXFP8}
	change(&g)
	return g
}

// A grouped GEMM is taken where what it skips, and the copies it saves, are worth more than a
// library's higher rate.
func TestGroups(t *testing.T) {
	same := func(*kernels.Grouping) {}
	quantized := func(g *kernels.Grouping) { g.Format = dtype.MXFP8 }
	moved := func(g *kernels.Grouping) { quantized(g); g.Moved = true }
	four := func(g *kernels.Grouping) { g.Format = dtype.NVFP4 }
	for _, row := range []struct {
		name  string
		g     kernels.Grouping
		takes bool
		why   string
	}{
		{"bf16", mixtral(same), true, "skipped"},
		{"MXFP8", mixtral(quantized), true, "skipped"},
		{"MXFP8, gathered", mixtral(moved), true, "as FSDP gathers"},
		{"gradient, which a library computes faster", mixtral(func(g *kernels.Grouping) { g.Grad = true }),
			false, "does not pay"},
		{"gradient, reduced", mixtral(func(g *kernels.Grouping) { moved(g); g.Grad = true }), true,
			"as FSDP gathers"},
		{"gradient, reduced, bf16", mixtral(func(g *kernels.Grouping) { g.Grad, g.Moved = true, true }),
			true, "as FSDP gathers"},
		{"gradient in float32", mixtral(func(g *kernels.Grouping) { g.Grad, g.Wide = true, true }), false,
			"float32"},
		{"full slots", mixtral(func(g *kernels.Grouping) { g.Slots = 2048 }), false, "100 %"},
		{"few slots", mixtral(func(g *kernels.Grouping) { g.Slots = 3072 + 32 }), false, "whole tiles"},
		{"short sums", mixtral(func(g *kernels.Grouping) { g.In = 512 }), false, "does not pay"},
		{"NVFP4", mixtral(four), false, "does not pay"},
		{"NVFP4, gathered", mixtral(func(g *kernels.Grouping) { four(g); g.Moved = true }), true,
			"as FSDP gathers"},
		{"NVFP4, long sums", mixtral(func(g *kernels.Grouping) { four(g); g.Out, g.In = g.In, g.Out }), true,
			"skipped"},
		{"NVFP4, gradient", mixtral(func(g *kernels.Grouping) { four(g); g.Grad = true }), false,
			"does not pay"},
		{"NVFP4, gradient, reduced", mixtral(func(g *kernels.Grouping) { four(g); g.Grad, g.Moved = true, true }),
			true, "as FSDP gathers"},
		{"another format", mixtral(func(g *kernels.Grouping) { g.Format = "fp8" }), false, "NVFP4"},
		{"float32", mixtral(func(g *kernels.Grouping) { g.Elem = dtype.F32 }), false, "bf16"},
		{"slots of 64 devices", deepseek(same), false, "100 %"},
		{"slots of 64 devices, gathered", deepseek(func(g *kernels.Grouping) { g.Moved = true }), false,
			"100 %"},
		{"gradient of slots of 64 devices", deepseek(func(g *kernels.Grouping) { g.Grad = true }), false,
			"100 %"},
	} {
		for _, arch := range []string{"sm_100", "sm_103", "sm_120"} {
			why, ok := kernels.For(arch).Groups(row.g)
			if ok != row.takes || !strings.Contains(why, row.why) {
				t.Errorf("%s on %s: %v, %q", row.name, arch, ok, why)
			}
		}
		for _, s := range []*kernels.Selector{nil, kernels.For("cpu"), kernels.For("sm_90"),
			kernels.For("sm_100").With(kernels.Options{Without: true})} {
			if why, ok := s.Groups(row.g); ok || why != "" {
				t.Errorf("%s without own kernels: %q", row.name, why)
			}
		}
	}
	// What does not pay can be asked for; what there is no kernel for cannot.
	ask := kernels.For("sm_100").With(kernels.Options{Grouped: true})
	if _, ok := ask.Groups(deepseek(same)); !ok {
		t.Error("it is not taken where it is asked for")
	}
	if _, ok := ask.Groups(mixtral(func(g *kernels.Grouping) { g.Slots++ })); ok {
		t.Error("half a tile is taken")
	}
}

// A kernel that differs on a GPU is not taken; others are.
func TestGroupsRefused(t *testing.T) {
	s := kernels.For("sm_100").With(kernels.Options{Refused: []string{"grouped mxfp8"}})
	moved := func(g *kernels.Grouping) { g.Format, g.Moved = dtype.MXFP8, true }
	if why, ok := s.Groups(mixtral(moved)); ok || !strings.Contains(why, "differs") {
		t.Errorf("a refused kernel is taken: %q", why)
	}
	for _, g := range []kernels.Grouping{mixtral(func(*kernels.Grouping) {}),
		mixtral(func(g *kernels.Grouping) { moved(g); g.Grad = true })} {
		if why, ok := s.Groups(g); !ok {
			t.Errorf("%+v: %q", g, why)
		}
	}
}

// Rows that are expected in tiles: half a tile of each part is empty, or a whole one.
func TestFilled(t *testing.T) {
	for _, row := range []struct {
		g    kernels.Grouping
		want int64
	}{
		{mixtral(func(*kernels.Grouping) {}), 8 * 2176},
		{mixtral(func(g *kernels.Grouping) { g.Parts = 8 }), 8 * 2560},
		{mixtral(func(g *kernels.Grouping) { g.Grad = true }), 8 * 2176},
		{mixtral(func(g *kernels.Grouping) { g.Grad, g.Parts = true, 8 }), 8 * 3072},
		{mixtral(func(g *kernels.Grouping) { g.Grad, g.Format = true, dtype.NVFP4 }), 8 * 2304},
		{deepseek(func(*kernels.Grouping) {}), 4 * 64 * 192},
	} {
		if got := row.g.Filled(); got != row.want {
			t.Errorf("%+v: %d, not %d", row.g, got, row.want)
		}
	}
}

package kernels_test

import (
	"fmt"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/flash"
)

// What must be moved in memory beside a product decides how it is written.
func TestProduct(t *testing.T) {
	for _, row := range []struct {
		name string
		form kernels.MatmulShape
		want kernels.MatmulStrategy
	}{
		{"f32 takes every form",
			kernels.MatmulShape{Batch: 1, M: 384, N: 1536, K: 2048, Elem: dtype.F32}, kernels.MatmulStrategy{}},
		{"f32, the other way round",
			kernels.MatmulShape{Batch: 1, M: 384, N: 1536, K: 2048, Elem: dtype.F32, NFirst: true},
			kernels.MatmulStrategy{Swap: true}},
		{"forward",
			kernels.MatmulShape{Batch: 1, M: 2048, N: 1536, K: 384, Elem: dtype.BF16, ALast: true},
			kernels.MatmulStrategy{}},
		{"the gradient of [in, out]: the input is transposed, be it wider or not",
			kernels.MatmulShape{Batch: 1, M: 384, N: 1536, K: 2048, Elem: dtype.BF16},
			kernels.MatmulStrategy{Transpose: true}},
		{"the gradient of [out, in]: the output's side is transposed",
			kernels.MatmulShape{Batch: 1, M: 1536, N: 384, K: 2048, Elem: dtype.BF16, NFirst: true},
			kernels.MatmulStrategy{Swap: true, Transpose: true}},
		{"the gradient of a table: transposing the result is cheaper than transposing the scores",
			kernels.MatmulShape{Batch: 1, M: 384, N: 40960, K: 20480, Elem: dtype.BF16, NFirst: true},
			kernels.MatmulStrategy{Transpose: true}},
		{"one row", kernels.MatmulShape{Batch: 1, M: 1, N: 64, K: 64, Elem: dtype.BF16, ALast: true},
			kernels.MatmulStrategy{Wide: true}},
		{"what cannot be split cannot be transposed",
			kernels.MatmulShape{Batch: 1, M: 64, N: 64, K: 37, Elem: dtype.BF16}, kernels.MatmulStrategy{Wide: true}},
	} {
		t.Run(row.name, func(t *testing.T) {
			s := kernels.For("cpu")
			if got := s.Matmul(row.form); got != row.want {
				t.Errorf("got %+v, want %+v", got, row.want)
			}
			s.Matmul(row.form)
			if list := s.Choices(); len(list) != 1 || list[0].Why == "" {
				t.Errorf("the choice was kept as %v", list)
			}
		})
	}
}

// attention is the operation of a causal attention of n rows.
func attention(t *testing.T, rows, keys int64, how ir.Attention) *ir.Op {
	t.Helper()
	b := ir.NewBuilder("attention")
	d := func(name string, n int64) ir.Dim { return ir.Dim{Name: name, Size: n} }
	q := b.Input("q", ir.Data, ir.Type{Elem: dtype.F32, Dims: []ir.Dim{d(ir.Seq, rows), d(ir.Heads, 2), d(ir.HeadDim, 4)}}, "")
	kt := ir.Type{Elem: dtype.F32, Dims: []ir.Dim{d(ir.Keys, keys), d(ir.KVHeads, 2), d(ir.HeadDim, 4)}}
	k := b.Input("k", ir.Data, kt, "")
	g, err := b.Graph(b.Attend(q, k, k, how))
	if err != nil {
		t.Fatal(err)
	}
	return g.Ops[0]
}

// Query blocks hold every query once and every key that it sees.
func TestQueryBlocks(t *testing.T) {
	for _, row := range []struct {
		rows, keys int64
		how        ir.Attention
		gemm       dtype.DType
		want       string
	}{
		{256, 256, ir.Attention{Scale: 1, Causal: true}, dtype.F32,
			"[{0 64 0 64} {64 128 0 128} {128 192 0 192} {192 256 0 256}]"},
		{256, 256, ir.Attention{Scale: 1, Causal: true}, dtype.BF16, "[{0 128 0 128} {128 256 0 256}]"},
		{256, 256, ir.Attention{Scale: 1, Causal: true, Window: 30}, dtype.BF16,
			"[{0 128 0 128} {128 256 99 256}]"},
		{100, 100, ir.Attention{Scale: 1, Causal: true}, dtype.F32, "[{0 100 0 100}]"},
		{256, 512, ir.Attention{Scale: 1, Causal: true}, dtype.F32, "[{0 256 0 512}]"},
		{256, 256, ir.Attention{Scale: 1}, dtype.F32, "[{0 256 0 256}]"},
	} {
		op := attention(t, row.rows, row.keys, row.how)
		got := kernels.For("cpu").QueryBlocks(op, row.gemm, row.rows, row.keys)
		if fmt.Sprint(got) != row.want {
			t.Errorf("%d rows in %s, %+v: %v, want %s", row.rows, row.gemm, row.how, got, row.want)
		}
	}
}

func TestChunksCoverARow(t *testing.T) {
	for _, width := range []int64{1, 7, 8, 9, 4096, 50257} {
		at, n := int64(0), 0
		for from, to := range kernels.Chunks(width) {
			if from != at || to <= from {
				t.Fatalf("%d: a chunk from %d to %d after %d", width, from, to, at)
			}
			at, n = to, n+1
		}
		if at != width || n > 8 {
			t.Errorf("%d: %d chunks end at %d", width, n, at)
		}
	}
}

// A CPU has no memory but the host's, and no options for it; options that are there stay.
func TestOffloading(t *testing.T) {
	given := map[string]any{"a": 1}
	for arch, want := range map[string]int{"cpu": 1, "sm_100": 2} {
		s := kernels.For(arch)
		if got := s.Offloading(given); len(got) != want || len(given) != 1 {
			t.Errorf("%s: %v of %v", arch, got, given)
		}
		if (s.HostMemory() == "") != (arch == "cpu") {
			t.Errorf("%s: the host is %q", arch, s.HostMemory())
		}
	}
}

// Loops are written twice where weights are gathered ahead in MXFP8, on GPUs with kernels of our own.
func TestDoubled(t *testing.T) {
	given := map[string]any{"a": 1}
	mx, both := []dtype.Format{dtype.MXFP8}, []dtype.Format{dtype.MXFP8, dtype.NVFP4}
	for _, c := range []struct {
		s       *kernels.Selector
		ahead   bool
		formats []dtype.Format
		want    int
	}{
		{kernels.For("sm_100"), true, mx, 2}, {kernels.For("sm_100"), false, mx, 1},
		{kernels.For("sm_100"), true, both, 1}, {kernels.For("sm_100"), true, nil, 1},
		{kernels.For("cpu"), true, mx, 1},
		{kernels.For("sm_100").With(kernels.Options{Without: true}), true, mx, 1},
	} {
		if got := c.s.Doubled(given, c.ahead, c.formats); len(got) != c.want || len(given) != 1 {
			t.Errorf("%s, ahead %v, %v: %v", c.s.Arch(), c.ahead, c.formats, got)
		}
	}
}

// Only what runs on the GPUs that Deepwell trains on may begin with memory of any contents: the CPU
// cannot allocate it, and references of replays keep zeros.
func TestUninitializedStacks(t *testing.T) {
	for arch, want := range map[string]bool{"cpu": false, "sm_80": false, "sm_90": false,
		"sm_100": true, "sm_103": true, "sm_120": true} {
		if got := kernels.For(arch).UninitializedStacks(); got != want {
			t.Errorf("%s: %v", arch, got)
		}
	}
	if (*kernels.Selector)(nil).UninitializedStacks() {
		t.Error("every target: true")
	}
}

// Chunks of a sequence are cuDNN's calls in every kind of context parallelism, and so are windows
// that begin within the chunk before; others have a reason.
func TestAttentionToChunks(t *testing.T) {
	chunk := kernels.Attention{Elem: dtype.BF16, Head: 128, Causal: true, Chunk: 512}
	for _, row := range []struct {
		change func(*kernels.Attention)
		kernel string
		why    string
	}{
		{func(*kernels.Attention) {}, kernels.CuDNN, "by length"},
		{func(a *kernels.Attention) { a.Ring = true }, kernels.CuDNN, "of a ring"},
		{func(a *kernels.Attention) { a.Window = 513 }, kernels.CuDNN, "the chunk before"},
		{func(a *kernels.Attention) { a.Window = 514 }, kernels.Plain, "before the previous chunk"},
		{func(a *kernels.Attention) { a.Window = 2 }, kernels.Plain, "a single query"},
		{func(a *kernels.Attention) { a.Documents = true }, kernels.CuDNN, "by length"},
		{func(a *kernels.Attention) { a.Documents, a.Window = true, 9 }, kernels.Plain, "a window and"},
		{func(a *kernels.Attention) { a.Causal = false }, kernels.Plain, "under a causal mask"},
		{func(a *kernels.Attention) { a.Lengths = true }, kernels.Plain, "without another mask"},
	} {
		a := chunk
		row.change(&a)
		kernel, why := kernels.For("sm_100").Attention(a)
		if kernel != row.kernel || !strings.Contains(why, row.why) {
			t.Errorf("%+v: %s, %s", a, kernel, why)
		}
	}
}

// What cuDNN has no call for is flash attention of our own, on GPUs where we have kernels; the rest
// stays plain, with a reason.
func TestFlashAttention(t *testing.T) {
	capped := kernels.Attention{Elem: dtype.BF16, Head: 256, Causal: true, Capped: true}
	with := func(change func(*kernels.Attention)) kernels.Attention {
		a := capped
		change(&a)
		return a
	}
	refused := kernels.Options{Refused: []string{"attention softcap"}}
	for _, row := range []struct {
		name    string
		arch    string
		options kernels.Options
		a       kernels.Attention
		kernel  string
		why     string
	}{
		{"soft cap", "sm_100", kernels.Options{}, capped, kernels.Triton, "no soft cap; a kernel of our own"},
		{"window, documents", "sm_103", kernels.Options{}, with(func(a *kernels.Attention) {
			a.Window, a.Documents = 4096, true
		}), kernels.Triton, "no soft cap; a kernel"},
		{"latent", "sm_120", kernels.Options{}, kernels.Attention{Elem: dtype.BF16, Head: 192, Value: 128,
			Causal: true}, kernels.Triton, "not 192 with 128; a kernel"},
		{"cuDNN stays", "sm_100", kernels.Options{}, kernels.Attention{Elem: dtype.BF16, Head: 192,
			Value: 128, Causal: true}, kernels.CuDNN, "supports"},
		{"odd", "sm_100", kernels.Options{}, kernels.Attention{Elem: dtype.BF16, Head: 20}, kernels.Triton,
			"not 20 with 20; a kernel"},
		{"too large", "sm_100", kernels.Options{}, with(func(a *kernels.Attention) { a.Head = 264 }),
			kernels.Plain, "not 264"},
		{"f16", "sm_100", kernels.Options{}, with(func(a *kernels.Attention) { a.Elem = dtype.F16 }),
			kernels.Plain, "soft cap"},
		{"asked for", "sm_100", kernels.Options{}, with(func(a *kernels.Attention) { a.Plain = true }),
			kernels.Plain, "the plan says"},
		{"chunks", "sm_100", kernels.Options{}, with(func(a *kernels.Attention) { a.Chunk = 512 }),
			kernels.Plain, "soft cap"},
		{"older", "sm_90", kernels.Options{}, capped, kernels.Plain, "soft cap"},
		{"without own", "sm_100", kernels.Options{Without: true}, capped, kernels.Plain, "soft cap"},
		{"refused", "sm_100", refused, capped, kernels.Plain, "differs on a GPU"},
		{"another is refused", "sm_120", refused, with(func(a *kernels.Attention) { a.Capped = false }),
			kernels.Triton, "of our own"},
	} {
		kernel, why := kernels.For(row.arch).With(row.options).Attention(row.a)
		if kernel != row.kernel || !strings.Contains(why, row.why) {
			t.Errorf("%s: %s, %s", row.name, kernel, why)
		}
	}
}

// Kernels and planners count the keys that queries see alike.
func TestMeanKeys(t *testing.T) {
	for _, seq := range []float64{1, 7, 4096} {
		for _, window := range []float64{1, 5, 512, 9000} {
			if got, want := flash.MeanKeys(seq, window), ir.MeanKeys(seq, window); got != want {
				t.Errorf("%g keys of %g by %g, want %g", got, seq, window, want)
			}
		}
	}
}

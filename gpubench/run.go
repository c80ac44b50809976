package gpubench

import (
	"context"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/price"
	"github.com/deepwell/deepwell/program"
)

// The kinds of benchmark.
const (
	GEMM      = "gemm"
	Attention = "attention"
	Layer     = "layer"
	MoE       = "moe"
)

// Kinds lists them.
func Kinds() []string { return []string{GEMM, Attention, Layer, MoE} }

// Options say what is measured, and by whom.
type Options struct {
	Kind   string
	Model  *model.Config
	Format dtype.Format  // of GEMMs: mxfp8, nvfp4, or "" for bf16
	Seq    int64         // tokens
	Arch   string        // of the GPU
	Peak   float64       // its dense bf16 rate, in FLOP/s; 0 if the catalogue lacks it
	Prices *price.Prices // nil if the catalogue lacks it
	// Timer gives the best time of a program on a GPU, in seconds.
	Timer        func(ctx context.Context, m *program.Module, vocab int64) (float64, error)
	WithoutCuDNN string // why cuDNN does not open; "" if it does
	// Torch is a Python with torch; "" measures without.
	Torch string
	// Progress, if there is one, hears how many operations are measured, and of how many.
	Progress func(done, total int)
}

// A Row is an operation with its times in seconds. A time that was not taken is 0.
type Row struct {
	Operation string  `json:"operation"`
	Shape     string  `json:"shape"`
	FLOPs     float64 `json:"flops"`
	Own       float64 `json:"own_seconds"`   // with kernels of our own
	Plain     float64 `json:"plain_seconds"` // without them
	Modelled  float64 `json:"modelled_seconds,omitempty"`
	Torch     float64 `json:"torch_seconds,omitempty"`
	Roofline  float64 `json:"roofline,omitempty"` // of Own: the share of the dense bf16 peak
	Notes     string  `json:"notes,omitempty"`
}

// A Report is what was measured.
type Report struct {
	Kind      string `json:"kind"`
	Model     string `json:"model"`
	Precision string `json:"precision"`
	GPU       string `json:"gpu"`
	Torch     string `json:"torch,omitempty"` // its version, or why it was not measured
	Rows      []Row  `json:"rows"`
}

type bench struct {
	o      Options
	prices *price.Prices
}

// Run measures the operations of a kind, one after the other.
func Run(ctx context.Context, o Options) (*Report, error) {
	b := &bench{o, o.Prices}
	draw, ok := map[string]func() ([]*benchCase, error){GEMM: b.gemms, Attention: b.attentions,
		Layer: b.layer, MoE: b.layer}[o.Kind]
	switch {
	case !ok:
		return nil, diag.New(diag.BadUsage, "there is no benchmark %q", o.Kind).
			Try("deepwell bench %s MODEL", strings.Join(Kinds(), "|"))
	case o.Kind != GEMM && o.Kind != Attention && o.Model.MLA != nil && o.Model.MoE.Dense > 0:
		return nil, diag.New(diag.NotSupported, "the first layers of the model are not as the others").
			Because("a layer is measured as the difference of programs of six layers and of four").
			Try("deepwell bench gemm")
	}
	cases, err := draw()
	if err != nil {
		return nil, err
	}
	for _, c := range cases {
		if o.WithoutCuDNN != "" && strings.Contains(c.own[0].Text, "__cudnn$") {
			return nil, diag.New(diag.LibraryMissing, "%s is cuDNN's, which does not open here",
				c.operation).Because("%s", o.WithoutCuDNN).Try("deepwell doctor says what is missing")
		}
	}
	r := &Report{Kind: o.Kind, Precision: string(b.format()), Rows: []Row{}}
	var rows []torchCase
	for _, c := range cases {
		rows = append(rows, c.torch)
	}
	seconds, said := torchTimes(ctx, o.Torch, "cuda", rows)
	r.Torch = said
	for i, c := range cases {
		row, err := b.measure(ctx, c)
		if err != nil {
			return nil, err
		}
		if i < len(seconds) {
			row.Torch = seconds[i]
		}
		r.Rows = append(r.Rows, row)
		if o.Progress != nil {
			o.Progress(i+1, len(cases))
		}
	}
	return r, nil
}

// measure times a case's programs.
func (b *bench) measure(ctx context.Context, c *benchCase) (row Row, err error) {
	row = Row{Operation: c.operation, Shape: c.shape, FLOPs: c.flops, Modelled: c.modelled}
	for _, side := range []struct {
		list []*program.Module
		to   *float64
	}{{c.own, &row.Own}, {c.plain, &row.Plain}} {
		if side.to == &row.Plain && side.list[len(side.list)-1].Text == c.own[len(c.own)-1].Text {
			row.Plain, row.Notes = row.Own, "no kernel of our own is in it"
			break
		}
		if *side.to, err = b.time(ctx, side.list); err != nil {
			return row, err
		}
	}
	if b.o.Peak > 0 && row.Own > 0 {
		row.Roofline = c.flops / row.Own / b.o.Peak
	}
	return row, nil
}

// time is of one program, or of half of what the second takes longer than the first.
func (b *bench) time(ctx context.Context, list []*program.Module) (float64, error) {
	var t [2]float64
	for i, m := range list {
		var err error
		if t[i], err = b.o.Timer(ctx, m, b.o.Model.Vocab); err != nil {
			return 0, err
		}
	}
	if len(list) == 1 {
		return t[0], nil
	}
	return max(0, t[1]-t[0]) / 2, nil
}

// weightName is a parameter's name without what counts layers.
func weightName(name string) string {
	_, name, ok := strings.Cut(name, "layers.")
	if !ok {
		return "output layer"
	}
	if n, rest, ok := strings.Cut(name, "."); ok && n == "{}" {
		name = rest
	}
	return strings.TrimSuffix(name, ".weight")
}

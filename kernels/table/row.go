package table

import (
	"fmt"
	"regexp"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/kernels/flash"
	"github.com/deepwell/deepwell/kernels/fused"
	"github.com/deepwell/deepwell/kernels/rownorm"
	"github.com/deepwell/deepwell/lower/stablehlo"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/overlap"
	"github.com/deepwell/deepwell/rewrite"
)

// Providers of kernels.
const (
	own    = "own"
	cudnn  = "cuDNN"
	cublas = "cuBLAS"
	fusion = "XLA fusion"
)

// A maker makes rows of kernels.
type maker struct {
	choices []kernels.Choice
	gpu     machine.GPUModel
}

// add adds a kernel to its row.
func (m maker) add(l *Layer, k overlap.Kernel) {
	g := l.group(k)
	g.Total.add(k)
	row := m.row(k)
	at := slices.IndexFunc(g.Rows, func(r Row) bool {
		return r.Operation == row.Operation && r.Shape == row.Shape && r.Kernel == row.Kernel
	})
	if at < 0 {
		at = len(g.Rows)
		g.Rows = append(g.Rows, row)
	}
	r := &g.Rows[at]
	r.add(k)
	r.FLOPs += k.FLOPs
	r.Roofline = m.ideal(r.Bytes, r.FLOPs, k.Bits) / r.Seconds
}

// row describes a kernel.
func (m maker) row(k overlap.Kernel) Row {
	n, named := stablehlo.ParseName(k.OpName)
	r := Row{Operation: strings.TrimSpace(string(n.Tag) + " " + rewrite.SourceKind(n.Kind)),
		Shape: k.Shape, Kernel: trimmed(k.Name), Provider: fusion}
	switch {
	case k.Spec != "":
		r.Provider = own
		if g, err := fused.ParseGroup(k.Spec); err == nil {
			r.Kernel = strings.ReplaceAll(g.Name(), "_", " ")
		} else if l, err := fused.ParseLoss(k.Spec); err == nil {
			r.Kernel, r.Shape = "loss in place", fmt.Sprintf("%d×%d", l.Rows, l.Cols)
		} else if norm, err := rownorm.Parse(k.Spec); err == nil {
			r.Kernel, r.Shape = norm.Key(), fmt.Sprintf("%d×%d", norm.Rows, norm.Cols)
		} else if a, err := flash.Parse(k.Spec); err == nil {
			r.Kernel = "flash " + string(a.Part)
			r.Shape = fmt.Sprintf("%d×%d×%d×%d", a.Batch, a.Heads, a.Seq, a.Head)
		} else if s, err := fused.ParseSpec(k.Spec); err == nil {
			r.own(s, n)
		}
	case strings.HasPrefix(k.Target, "__cudnn$"):
		r.Provider, r.Kernel = cudnn, strings.TrimPrefix(k.Target, "__cudnn$")
	case strings.HasPrefix(k.Target, "__cublas$"):
		r.Provider, r.Kernel = cublas, strings.TrimPrefix(k.Target, "__cublas$")
	case k.Target == hlo.Triton:
		r.Provider = own
	case k.Target != "":
		r.Provider, r.Kernel = "call", k.Target
	case !named:
		r.Operation = "stacks and copies"
	}
	if k.FLOPs > 0 && !strings.HasPrefix(n.Kind, "attention") {
		r.Operation = strings.TrimSpace(string(n.Tag) + " GEMM")
		if r.Shape = product(k); fused.IsGroup(k.Spec) {
			r.Shape = grouped(k.Spec)
		}
	}
	r.Why = m.why(r.Provider, n, named, k)
	return r
}

// own names what a kernel of our own computes, and for which matrix.
func (r *Row) own(s fused.Spec, n stablehlo.Name) {
	what := fused.Of(&s.Expr).Name
	switch r.Kernel = what + " " + string(s.Format); {
	case s.Amax: // the first of NVFP4's two kernels; the second quantizes
		r.Kernel = what + " amax"
		what = strings.TrimPrefix(what+" + amax", "quantize + ")
	case what != "quantize":
		what += " + quantize"
	}
	r.Operation = strings.TrimSpace(string(n.Tag) + " " + what)
	r.Shape = fmt.Sprintf("%d×%d", s.Batch*s.Rows, s.Cols)
}

// grouped writes the sizes M×N×K of a grouped GEMM, with the rows that are expected.
func grouped(spec string) string {
	g, err := fused.ParseGroup(spec)
	if err != nil {
		return spec
	}
	rows := fmt.Sprintf("%d of %d", g.Filled, g.Rows)
	if g.Grad {
		return fmt.Sprintf("%d×%d×%d×(%s)", g.Experts, g.Out, g.In, rows)
	}
	return fmt.Sprintf("(%s)×%d×%d", rows, g.Out, g.In)
}

// number is what XLA puts behind a name to tell it from others.
var number = regexp.MustCompile(`(\.\d+|\.clone|\.double_buffer_clone)+$`)

func trimmed(name string) string { return number.ReplaceAllString(name, "") }

// product writes the sizes M×N×K of a GEMM's batch, by its result and FLOPs.
func product(k overlap.Kernel) string {
	_, inside, _ := strings.Cut(strings.TrimSuffix(k.Shape, "]"), "[")
	var sizes []string
	elements := int64(1)
	for text := range strings.SplitSeq(inside, ",") {
		var n int64
		if _, err := fmt.Sscan(text, &n); err != nil || n < 1 {
			return k.Shape
		}
		if n > 1 {
			sizes = append(sizes, text)
		}
		elements *= n
	}
	return strings.Join(append(sizes, fmt.Sprint(k.FLOPs/2/elements)), "×")
}

// why is the selector's reason, or what XLA does with operations for which there is no choice.
func (m maker) why(provider string, n stablehlo.Name, named bool, k overlap.Kernel) string {
	if s, err := fused.ParseSpec(k.Spec); err == nil && s.Amax {
		return "scales of NVFP4 need the largest magnitudes before anything is quantized"
	}
	chosen := map[string]string{own: kernels.Triton, cudnn: kernels.CuDNN}[provider]
	for _, c := range m.choices {
		if c.Kind == rewrite.SourceKind(n.Kind) && c.Kernel == chosen {
			return c.Why
		}
	}
	var against []string // why kernels that there are were not taken
	for _, c := range m.choices {
		plain := c.Kind == rewrite.SourceKind(n.Kind) && c.Kernel == kernels.Plain
		if named && provider == fusion && plain && !slices.Contains(against, c.Why) {
			against = append(against, c.Why)
		}
	}
	switch {
	case provider == cublas:
		return "XLA calls cuBLASLt for dense GEMMs"
	case len(against) > 0:
		return strings.Join(against, "; or: ")
	case provider == cudnn && strings.Contains(k.Target, "fmha"):
		return "cuDNN supports this shape"
	case !named:
		return "a loop takes from its stacks and puts into them"
	case n.Kind == "block_dot":
		return "operands and scales in the layout that the GEMM takes"
	case n.Kind == "scale_stats":
		return "counts of scales, for the precision monitor"
	}
	return "XLA fuses what neither a library nor a kernel of ours has"
}

// ideal is the seconds of a kernel by the data sheet's peaks.
func (m maker) ideal(bytes, flops int64, bits int) float64 {
	format := dtype.FormatBF16
	switch {
	case bits <= 4 && bits > 0:
		format = dtype.NVFP4
	case bits <= 8 && bits > 0:
		format = dtype.MXFP8
	}
	t := float64(bytes) / float64(m.gpu.MemoryBandwidth)
	if peak := m.gpu.Peak.Of(format); peak > 0 {
		t = max(t, float64(flops)/peak)
	}
	return t
}

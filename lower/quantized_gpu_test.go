package lower_test

import (
	"fmt"
	"math"
	"os"
	"path/filepath"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/engine"
	"github.com/deepwell/deepwell/hlo"
	"github.com/deepwell/deepwell/internal/enginetest"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/kernels"
	"github.com/deepwell/deepwell/lower"
	"github.com/deepwell/deepwell/machine"
	"github.com/deepwell/deepwell/program"
)

// optimized compiles a stage for a cluster and gives the report and the program that XLA made.
func optimized(t *testing.T, c *engine.Compiler, s *program.Module, cluster string) (*engine.Report, string) {
	t.Helper()
	dir := t.TempDir()
	s.Flags = kernels.For("sm_100").Exact(map[string]any{"xla_dump_to": dir, "xla_dump_hlo_as_text": true})
	r := enginetest.Report(t, c, s, cluster)
	files, err := filepath.Glob(filepath.Join(dir, "*gpu_after_optimizations.txt"))
	if err != nil || len(files) != 1 {
		t.Fatalf("the compiler wrote %v, %v", files, err)
	}
	text, err := os.ReadFile(files[0])
	if err != nil {
		t.Fatal(err)
	}
	return r, string(text)
}

// counted are the comments that number every fifth operand.
var counted = regexp.MustCompile(`/\*index=\d+\*/`)

// Results of which instructions with more than five operands read a part are counted.
func TestMovedBytes(t *testing.T) {
	text := `
ENTRY %main (p: f32[4]) -> f32[4] {
  %p = f32[4]{0} parameter(0)
  %f = (f32[4]{0}, f32[2]{0}) fusion(%p, %p, %p, %p, %p, /*index=5*/%p), kind=kLoop
  ROOT %g = f32[4]{0} fusion(%p, %p, %p, %p, %p, /*index=5*/%f#1), kind=kLoop
}`
	if bytes, n := moved(text); n != 2 || bytes != 6*16+24+5*16+8+16 {
		t.Errorf("%v bytes in %d kernels", bytes, n)
	}
}

// moved adds up what the kernels of a program's main function read and write, but for calls of
// cuDNN and what comes after them.
func moved(text string) (bytes float64, kernels int) {
	_, main, _ := strings.Cut(text, "\nENTRY ")
	line := regexp.MustCompile(`^\s*(?:ROOT )?%([\w.-]+) = (\(.*?\)|\S+) ([\w-]+)\(([^)]*)\)`)
	size, late := map[string][]float64{}, map[string]bool{}
	for l := range strings.Lines(main) {
		m := line.FindStringSubmatch(l)
		if m == nil {
			continue
		}
		name, kind := m[1], m[3]
		size[name] = shapeBytes(m[2])
		total := sum(size[name])
		for arg := range strings.SplitSeq(counted.ReplaceAllString(m[4], ""), ", ") {
			from, at, part := strings.Cut(strings.TrimPrefix(arg, "%"), "#")
			late[name] = late[name] || late[from]
			if i, err := strconv.Atoi(at); part && err == nil {
				total += size[from][i]
			} else {
				total += sum(size[from])
			}
		}
		late[name] = late[name] || kind == "custom-call" && !strings.Contains(l, "xla.gpu.triton")
		if kind == "custom-call" {
			continue
		}
		switch kind {
		case "parameter", "constant", "bitcast", "tuple", "get-tuple-element":
		default:
			if !late[name] {
				bytes, kernels = bytes+total, kernels+1
			}
		}
	}
	return bytes, kernels
}

func sum(list []float64) (n float64) {
	for _, v := range list {
		n += v
	}
	return n
}

// shapeBytes gives the sizes of the parts of a shape.
func shapeBytes(text string) (list []float64) {
	for _, m := range regexp.MustCompile(`(\w+)\[([\d,]*)\]`).FindAllStringSubmatch(text, -1) {
		d, err := dtype.Parse(m[1])
		if err != nil {
			continue
		}
		n := int64(1)
		for size := range strings.SplitSeq(m[2], ",") {
			if k, err := strconv.ParseInt(size, 10, 64); err == nil {
				n *= k
			}
		}
		list = append(list, float64(d.Bytes(n)))
	}
	return list
}

// On Blackwell the three GEMMs of a linear are cuDNN's, with plans; nothing multiplies dequantized
// numbers, and nothing transposes 4-bit elements. Bytes of quantization are logged as a multiple
// of reading each source once (for NVFP4 twice: its largest magnitude must be known first) and
// writing both copies.
func TestGEMMsAreCuDNNsOnBlackwell(t *testing.T) {
	c := enginetest.GPUCompiler(t, false)
	for _, row := range []struct {
		cluster       string
		format        ir.Format
		to            dtype.DType
		rows, in, out int64
		most          float64
		experts       int64
		first         bool // else weights are as fsdp gathers them, experts second
	}{
		{"1xb200", ir.MXFP8, dtype.BF16, 8192, 4096, 14336, 1.05, 0, false},
		{"1xgb300", ir.NVFP4, dtype.BF16, 8192, 4096, 14336, 1.07, 0, false},
		{"1xgb300", ir.MXFP8, dtype.BF16, 4096, 8192, 1024, 1.05, 0, false},
		{"1xb200", ir.NVFP4, dtype.BF16, 2048, 5120, 13824, 1.07, 0, false},
		{"1xrtx6000pro", ir.MXFP8, dtype.BF16, 2048, 1024, 4096, 1.05, 0, false},
		{"1xrtx6000pro", ir.NVFP4, dtype.BF16, 2048, 1024, 4096, 1.07, 0, false},
		{"1xb200", ir.MXFP8, dtype.BF16, 224, 96, 160, 0, 0, false}, // nothing is a whole tile
		{"1xb200", ir.NVFP4, dtype.BF16, 224, 96, 160, 0, 0, false},
		{"1xb200", ir.MXFP8, dtype.BF16, 1024, 7168, 2048, 1.4, 8, false},
		{"1xgb300", ir.NVFP4, dtype.BF16, 1024, 7168, 2048, 1.07, 8, true},
		// Tiles of weights in which experts are second have no kernel of our own, and one more pass over
		// codes and scales puts experts first: 2.25 bytes of each weight, of both copies, are 0.27 of the
		// ideal here.
		{"1xgb300", ir.NVFP4, dtype.BF16, 1024, 7168, 2048, 1.65, 8, false},
		{"1xrtx6000pro", ir.MXFP8, dtype.BF16, 160, 1024, 4096, 0, 3, false}, // rows are padded
		{"1xrtx6000pro", ir.NVFP4, dtype.BF16, 160, 1024, 4096, 0, 3, false},
	} {
		name := fmt.Sprintf("%s %s %d %d first %v", row.cluster, row.format, row.rows, row.experts,
			row.first)
		t.Run(name, func(t *testing.T) {
			if row.rows != 8192 || row.format != ir.MXFP8 {
				slowtest.Only(t)
			}
			cluster, err := machine.ParseCluster(row.cluster)
			if err != nil {
				t.Fatal(err)
			}
			set := kernels.For(cluster.GPU.Arch)
			g := quantizedGEMMs(t, row.format, dtype.BF16, row.rows, row.in, row.out)
			if row.experts > 0 {
				g = expertGEMMs(t, row.format, dtype.BF16, row.first, row.experts, row.rows, row.in, row.out)
			}
			s, err := lower.Module("linear", g, lower.Options{Kernels: set})
			if err != nil {
				t.Fatal(err)
			}
			r, text := optimized(t, c, s, row.cluster)
			plans, own, bytes := 0, 0, 0.0
			for _, call := range r.CustomCalls {
				switch {
				case call.Target == "__cudnn$blockScaledDot" && call.Plan == hlo.PlanCompiled:
					plans += int(call.Count)
				case call.Target == "__gpu$xla.gpu.triton":
					own, bytes = own+1, bytes+float64(call.OperandBytes+call.ResultBytes)
				}
			}
			want := 3 // kernels, of which NVFP4 has one more for each source
			if row.format == ir.NVFP4 {
				want = 6
			}
			if plans != 3 || len(r.CustomCalls) != 3+own || own != want {
				t.Errorf("%d of cuDNN's GEMMs among %+v", plans, r.CustomCalls)
			}
			if strings.Contains(text, " dot(") || strings.Contains(text, "wrapped_dot") {
				t.Error("a GEMM multiplies dequantized numbers")
			}
			if m := regexp.MustCompile(`= \(?f4e2m1fn\S* (transpose|copy|fusion)\(.*`).FindString(text); m != "" {
				t.Errorf("elements of four bits are moved: %s", m)
			}
			n := float64(max(row.experts, 1) * (row.rows*row.in + row.rows*row.out + row.in*row.out))
			ideal := n * (2 + 2*(1+1./32))
			if row.format == ir.NVFP4 {
				ideal = n * (2 + 2 + 2*(0.5+1./16))
			}
			others, count := moved(text)
			bytes += others
			t.Logf("%s: quantization moves %.0f MB in %d kernels, %d of our own, %.2f times the ideal; temp %d MB", name,
				bytes/1e6, count+own, own, bytes/ideal, r.Memory.Temp>>20)
			if row.most > 0 && bytes > row.most*ideal {
				t.Errorf("quantization moves %.2f times the ideal, at most %.2f", bytes/ideal, row.most)
			}
			// What plans are priced by is what is measured here.
			priced := set.Quantizing(row.format).Bytes(n, 2, 2, false)
			if row.most > 0 && row.experts == 0 && math.Abs(bytes/priced-1) > 0.01 {
				t.Errorf("quantization moves %.0f MB and is priced as %.0f MB", bytes/1e6, priced/1e6)
			}
		})
	}
}

// The scales that we hand to cuDNN lie as those that XLA makes for its own block-scaled product.
func TestScalesLieAsXLAsOwn(t *testing.T) {
	c := enginetest.GPUCompiler(t, false)
	const rows, in, out = 1024, 2048, 640
	own := `module @own {
  func.func @main(%x: tensor<1024x2048xf8E4M3FN>, %w: tensor<640x2048xf8E4M3FN>,
      %xs: tensor<1024x64xf8E8M0FNU>, %ws: tensor<640x64xf8E8M0FNU>) -> tensor<1024x640xbf16> {
    %y = stablehlo.custom_call @__op$block_scaled_dot(%x, %w, %xs, %ws) {api_version = 2 : i32}
      : (tensor<1024x2048xf8E4M3FN>, tensor<640x2048xf8E4M3FN>, tensor<1024x64xf8E8M0FNU>,
      tensor<640x64xf8E8M0FNU>) -> tensor<1024x640xbf16>
    return %y : tensor<1024x640xbf16>
  }
}
`
	b := ir.NewBuilder("ours")
	input := func(name string, d dtype.DType, n, k int64) *ir.Value {
		return b.Input(name, ir.Data, ir.Type{Elem: d, Dims: []ir.Dim{{Name: name, Size: n},
			{Name: "embed", Size: k}}}, "")
	}
	side := func(name string, n int64) []*ir.Value {
		codes, scales := input(name, dtype.F8E4M3FN, n, in), input(name+"s", dtype.F8E8M0FNU, n, in/32)
		scales.Type.Dims[0].Name = name
		return []*ir.Value{codes, scales}
	}
	g, err := b.Graph(b.BlockDot(ir.MXFP8, side("x", rows), side("w", out), []string{"embed"}, dtype.BF16))
	if err != nil {
		t.Fatal(err)
	}
	text, err := lower.StableHLO(g, lower.Options{Kernels: kernels.For("sm_100")})
	if err != nil {
		t.Fatal(err)
	}
	_, want := optimized(t, c, &program.FromText("own", own, 1).Modules[0], "1xb200")
	_, got := optimized(t, c, &program.FromText("ours", text, 1).Modules[0], "1xb200")
	if w, g := swizzles(want), swizzles(got); len(w) != 2 || strings.Join(w, "\n") != strings.Join(g, "\n") {
		t.Errorf("XLA turns scales as %q, we as %q", w, g)
	}
}

// swizzles lists the transposes of a program, shapes and orders, without dimensions of 1.
func swizzles(text string) (list []string) {
	for _, m := range regexp.MustCompile(`= \w+\[([\d,]+)\]\S* transpose\(.*?dimensions=\{([\d,]+)\}`).
		FindAllStringSubmatch(text, -1) {
		sizes, order := strings.Split(m[1], ","), strings.Split(m[2], ",")
		if sizes[0] == "1" && order[0] == "0" {
			sizes, order = sizes[1:], order[1:]
			for i, at := range order {
				k, _ := strconv.Atoi(at)
				order[i] = strconv.Itoa(k - 1)
			}
		}
		list = append(list, strings.Join(sizes, ",")+" by "+strings.Join(order, ","))
	}
	slices.Sort(list)
	return list
}

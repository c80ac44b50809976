package rownorm_test

import (
	"bytes"
	"encoding/binary"
	"fmt"
	"math"
	"math/rand/v2"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/dtype/block"
	"github.com/deepwell/deepwell/kernels/rownorm"
	"github.com/deepwell/deepwell/kernels/triton"
	"github.com/deepwell/deepwell/kernels/triton/run"
)

// specs are kernels of every form: odd sizes, one row, stacks.
var specs = []string{
	"rms_norm 3x256 eps=1e-05 shift=0 normed",
	"rms_norm 5x96 eps=1e-05 shift=1 added normed",
	"rms_norm 1x4096 eps=1e-06 shift=0 added stats",
	"rms_norm 7x1000 eps=1e-05 shift=0 normed stats",
	"rms_norm 70x64 eps=1e-05 shift=0 stats",
	"rms_norm 6x128 eps=1e-05 shift=0 added normed rounds=3 from=0 into=1 saved=1 kept=0",
	"rms_norm 5x96 eps=1e-05 shift=0 normed rounds=2 saved=0 kept=0",
	"rms_norm 5x96 eps=1e-05 shift=1 added codes",
	"rms_norm 70x64 eps=1e-05 shift=0 codes stats",
	"rms_norm 6x4096 eps=1e-05 shift=0 added codes stats rounds=3 from=0 into=0",
	"rms_norm 6x128 eps=1e-05 shift=0 codes stats rounds=3 saved=0",
	"rms_norm_grad 3x256 eps=1e-05 shift=0 grads=1",
	"rms_norm_grad 5x96 eps=1e-05 shift=1 grads=2 residual",
	"rms_norm_grad 1x4096 eps=1e-06 shift=0 grads=3 residual",
	"rms_norm_grad 7x1000 eps=1e-05 shift=0 grads=1 residual",
	"rms_norm_grad 40000x64 eps=1e-05 shift=0 grads=1",
	"rms_norm_grad 6x128 eps=1e-05 shift=0 grads=2 residual rounds=3 from=0,4 into=0 saved=2",
}

// float32Bound is for sums of thousands of float32 terms. bf16Bound is for results in bfloat16, of
// which a few are rounded to a neighbour.
const float32Bound, bf16Bound = 2e-6, 3e-4

// codesBound is for codes of such results: one of 16 neighbours has another code, by up to an eighth.
const codesBound = 2e-3

// round is where kernels in a loop are: their stacks have a part before it.
const round = 1

// Kernels compute what their plain forms do, and leave other rounds' parts of stacks alone.
func TestKernels(t *testing.T) {
	r := rand.New(rand.NewPCG(22, 7))
	for _, text := range specs {
		n, err := rownorm.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		k, err := n.Kernel()
		if err != nil {
			t.Fatal(err)
		}
		if k.Spec != text {
			t.Errorf("%s says that it is %s", text, k.Spec)
		}
		all, in := draw(n, k, r)
		if err := run.Kernel(k, all); err != nil {
			t.Fatalf("%s: %v", text, err)
		}
		judge(t, n, k, all, in)
	}
}

// draw makes the arrays of a kernel, and its operands as numbers.
func draw(n rownorm.Norm, k *triton.Kernel, r *rand.Rand) (all [][]byte, in [][]float32) {
	for i, a := range k.Args {
		size := 1
		for _, d := range a.Shape {
			size *= d
		}
		switch {
		case a.Name == "round":
			all = append(all, []byte{round, 0, 0, 0})
		case i >= n.Operands():
			all = append(all, bytes.Repeat([]byte{0x3f}, size*a.Elem.Bits()/8))
		default:
			part := size
			if slices.Contains(n.From, i) {
				part /= n.Rounds
			}
			numbers, b := make([]float32, part), []byte(nil)
			for at := range numbers {
				w := dtype.BF16FromF32(float32(r.NormFloat64() * 2))
				numbers[at] = dtype.F32FromBF16(w)
				b = binary.LittleEndian.AppendUint16(b, w)
			}
			if part != size {
				rest := make([]byte, len(b))
				b = slices.Concat(rest, b, bytes.Repeat(rest, n.Rounds-2))
			}
			all, in = append(all, b), append(in, numbers)
		}
	}
	return all, in
}

// judge compares results with the plain form.
func judge(t *testing.T, n rownorm.Norm, k *triton.Kernel, all [][]byte, in [][]float32) {
	t.Helper()
	want := n.Plain(in)
	for _, i := range n.Saved {
		list := make([]float64, len(in[i]))
		for at, v := range in[i] {
			list[at] = float64(v)
		}
		want = append(want, list)
	}
	for _, i := range n.Kept {
		want = append(want, want[i])
	}
	first := slices.IndexFunc(k.Args, func(a triton.Arg) bool { return a.Result })
	if len(want) != len(k.Args)-first {
		t.Fatalf("%s: %d results", n, len(k.Args)-first)
	}
	for i, w := range want {
		a := k.Args[first+i]
		if a.Elem == triton.I8 { // scales, compared with their codes
			continue
		}
		got, bound := dtype.BF16.Values(all[first+i]), bf16Bound
		if a.Elem == triton.F32 {
			got, bound = dtype.F32.Values(all[first+i]), float32Bound
		}
		if a.Elem == triton.E4M3 {
			bound, w, got = codesBound, quantized(t, w), decoded(t, all[first+i], all[first+i+1])
		}
		if a.InPlace != "" {
			other := dtype.BF16.Values([]byte{0x3f, 0x3f})[0]
			rest := slices.Concat(got[:round*len(w)], got[(round+1)*len(w):])
			if slices.ContainsFunc(rest, func(v float64) bool { return v != other }) {
				t.Errorf("%s: %s: another round's part changed", n, a.Name)
			}
			got = got[round*len(w):][:len(w)]
		}
		if len(got) > len(w) { // parts
			sum := make([]float64, len(w))
			for at, v := range got {
				sum[at%len(w)] += v
			}
			got = sum
		}
		var off, size float64
		for at, v := range w {
			off, size = off+(got[at]-v)*(got[at]-v), size+v*v
		}
		if e := math.Sqrt(off / size); !(e <= bound) {
			t.Errorf("%s: %s is off by %.2g of %.2g", n, a.Name, e, bound)
		}
	}
}

// quantized gives what the codes of numbers stand for, decoded what codes do.
func quantized(t *testing.T, x []float64) []float64 {
	t.Helper()
	src := make([]float32, len(x))
	for i, v := range x {
		src[i] = float32(v)
	}
	q, scales := make([]byte, len(x)), make([]byte, len(x)/block.MXFP8Size)
	if err := block.MXFP8(q, scales, src); err != nil {
		t.Fatal(err)
	}
	return decoded(t, q, scales)
}

func decoded(t *testing.T, q, scales []byte) (list []float64) {
	t.Helper()
	values := make([]float32, len(q))
	if err := block.FromMXFP8(values, q, scales); err != nil {
		t.Fatal(err)
	}
	for _, v := range values {
		list = append(list, float64(v))
	}
	return list
}

// What parses prints itself.
func FuzzParse(f *testing.F) {
	for _, text := range specs {
		f.Add(text)
	}
	f.Add("rms_norm 7x16385 eps=1e-05 shift=0 normed")
	f.Add("rms_norm_grad 7x64 eps=0 shift=0 grads=4 residual")
	f.Fuzz(func(t *testing.T, text string) {
		n, err := rownorm.Parse(text)
		if err != nil {
			return
		}
		if n.String() != text || !rownorm.Is(text) {
			t.Errorf("%q is printed as %q", text, n)
		}
		if n.Bytes() <= 0 || n.Operands() < len(n.Matrices()) {
			t.Errorf("%q moves %d bytes", text, n.Bytes())
		}
	})
}

// Rows that are too long, and forms that no kernel has, are refused.
func TestForms(t *testing.T) {
	for _, text := range []string{
		"rms_norm 7x16385 eps=1e-05 shift=0 normed",
		"rms_norm_grad 7x8193 eps=1e-05 shift=0 grads=1",
		"rms_norm_grad 7x64 eps=1e-05 shift=0 grads=4",
		"rms_norm_grad 7x64 eps=1e-05 shift=0 grads=1 normed",
		"rms_norm 7x64 eps=0 shift=0 normed",
		"rms_norm 7x64 eps=1e-39 shift=0 normed", // a GPU may take it for 0
		"rms_norm 7x64 eps=1e+39 shift=0 normed",
		"rms_norm 7x64 eps=1e-05 shift=1e+300 normed",
		"rms_norm 2147483647x64 eps=1e-05 shift=0 normed",
		"rms_norm 7x64 eps=1e-05 shift=0 added",
		"rms_norm 7x64 eps=1e-05 shift=0 normed codes",
		"rms_norm 7x48 eps=1e-05 shift=0 codes",
		"rms_norm 7x64 eps=1e-05 shift=0 codes rounds=2 into=0",
		"rms_norm_grad 7x64 eps=1e-05 shift=0 grads=1 codes",
		"rms_norm 7x64 eps=1e-05 shift=0 normed from=0",
		"rms_norm 7x64 eps=1e-05 shift=0 normed rounds=2 from=1",
		"rms_norm 7x64 eps=1e-05 shift=0 normed rounds=2 into=0 kept=0",
		"rms_norm 7x64 eps=1e-05 shift=0 stats rounds=2 into=0",
	} {
		if n, err := rownorm.Parse(text); err == nil {
			t.Errorf("%s is taken as %s", text, n)
		}
	}
}

// Elements beyond 2^31 are counted by 64 bits: of a matrix, and of a stack of smaller ones.
func TestManyElements(t *testing.T) {
	for text, wide := range map[string]bool{
		"rms_norm 262143x8192 eps=1e-05 shift=0 added normed":                           false,
		"rms_norm 262144x8192 eps=1e-05 shift=0 added normed":                           true,
		"rms_norm_grad 2147479551x128 eps=1e-05 shift=0 grads=1":                        true,
		"rms_norm 8192x16384 eps=1e-05 shift=0 normed rounds=126 from=0 into=0":         false,
		"rms_norm_grad 262144x8192 eps=1e-05 shift=0 grads=1 residual rounds=80 from=0": true,
	} {
		n, err := rownorm.Parse(text)
		if err != nil {
			t.Fatal(err)
		}
		k, err := n.Kernel()
		if err != nil {
			t.Fatal(err)
		}
		for line := range strings.Lines(k.Text) {
			line = strings.TrimSpace(line)
			switch {
			case !strings.Contains(line, "tt.addptr"):
			case strings.Contains(line, "tensor<1x"+fmt.Sprint(n.Cols)+"x!tt.ptr<bf16>"):
				if strings.HasSuffix(line, "xi64>") != wide {
					t.Errorf("%s: %s", text, line)
				}
			case strings.Contains(line, ": !tt.ptr<bf16>") && !strings.HasSuffix(line, "i64"): // to a round
				t.Errorf("%s: %s", text, line)
			}
		}
	}
}

package replay

import (
	"slices"
	"testing"

	"github.com/deepwell/deepwell/program"
)

// censusProgram is a program with a fusion, a GEMM, a gather in two groups and a permutation, of n
// rows.
func censusProgram(n int64, epilogue string, groups msg) []byte {
	b := newBuilder("census")
	rows, wide := arr(typeF32, []int64{n, 4}), arr(typeF32, []int64{n, 8})
	x := b.param(0, rows)
	inner := b.computation("fused")
	id := inner.done(inner.op("negate", rows, nil, inner.param(0, rows)))
	x = b.op("fusion", rows, msg(nil).Text(11, "kLoop").Packed(38, id).
		Text(43, `{"fusion_backend_config":{"kind":"__triton"}}`), x)
	y := b.call("__cublas$lt$matmul", gemmText(1, 0, epilogue, false, 4*n, 4*n),
		tup(arr(typeF32, []int64{n, n}), arr(typeS8, []int64{n})), x, b.param(1, arr(typeF32, []int64{4, n})))
	g := b.op("all-gather", wide, append(msg(nil).Packed(14, 1), groups...), x)
	p := b.op("collective-permute", rows, msg(nil).Bytes(52, msg(nil).Int(1, 0).Int(2, 1)), x)
	return b.returns(b.element(y, 0), g, p)
}

// A census tells kinds and not sizes, and names axes: of 2 × 2 devices, 0 and 2 differ in the outer
// one.
func TestCensus(t *testing.T) {
	mesh := []program.Axis{{Name: "fsdp", Size: 2}, {Name: "tp", Size: 2}}
	census := func(code []byte, mesh []program.Axis) Census {
		t.Helper()
		c, err := CensusOf("hlo", code, mesh)
		if err != nil {
			t.Fatal(err)
		}
		return c
	}
	small := census(censusProgram(8, "DEFAULT", groupLists()), mesh)
	for _, want := range []string{"fusion kLoop __triton", "opcode negate",
		"collective all-gather of f32 along fsdp", "collective collective-permute of f32 along tp",
		"call __cublas$lt$matmul(f32, f32) → (f32, s8); algorithm ALG_UNSET; alpha_real 1; " +
			"epilogue DEFAULT; lhs_contracting_dimensions [1]; operand_precision [DEFAULT DEFAULT]; " +
			"rhs_contracting_dimensions [0]"} {
		if !slices.Contains(small, want) {
			t.Errorf("%q is not in %q", want, small)
		}
	}
	large := census(censusProgram(64, "DEFAULT", groupIota()), mesh)
	if more := append(large.Without(small), small.Without(large)...); len(more) > 0 {
		t.Errorf("sizes make a difference: %q", more)
	}
	other := census(censusProgram(8, "GELU", nil), mesh)
	more := other.Without(small)
	if len(more) != 2 || more[1] != "collective all-gather of f32 along fsdp × tp" {
		t.Errorf("another epilogue and all devices: %q", more)
	}
	if u := small.Union(other); len(u.Without(small)) != 2 || len(small.Without(u)) != 0 {
		t.Errorf("union: %q", u)
	}
	steps := []string{"dynamic-slice with a stride", "loop of more than one trip"}
	loop := census(loopProgram(loopConfigText(4, 0, 1), sliceConfigText(36, -12)), nil)
	one := census(loopProgram(loopConfigText(1, 0, 1), sliceConfigText(36, 0)), nil)
	if more := loop.Without(one); !slices.Equal(more, steps) {
		t.Errorf("a loop of 4 trips has %q", more)
	}
	if _, err := CensusOf("hlo", []byte("x"), nil); err == nil {
		t.Error("no error for a damaged program")
	}
}

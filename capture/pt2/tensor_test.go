package pt2

import (
	"bytes"
	"fmt"
	"strings"
	"testing"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

func sizesText(list []int64) string {
	var b strings.Builder
	for i, n := range list {
		if i > 0 {
			b.WriteString(", ")
		}
		fmt.Fprintf(&b, `{"as_int": %d}`, n)
	}
	return "[" + b.String() + "]"
}

// Any view, whether transposed, expanded, stepped or overlapping, is read element by element as its
// strides say if it fits into its storage, and is refused otherwise.
func TestViews(t *testing.T) {
	kinds := map[int64]dtype.DType{1: dtype.U8, 13: dtype.BF16, 7: dtype.F32, 5: dtype.S64, 11: dtype.C128}
	rapid.Check(t, func(t *rapid.T) {
		kind := rapid.SampledFrom([]int64{1, 13, 7, 5, 11}).Draw(t, "kind")
		width := int64(kinds[kind].Bits() / 8)
		dims := rapid.SliceOfN(rapid.Int64Range(0, 5), 0, 5).Draw(t, "dims")
		strides := rapid.SliceOfN(rapid.Int64Range(0, 20), len(dims), len(dims)).Draw(t, "strides")
		offset := rapid.Int64Range(0, 20).Draw(t, "offset")
		storage := rapid.SliceOfN(rapid.Byte(), 1, 1500).Draw(t, "storage")

		// The elements, one by one.
		want, fits := []byte{}, true
		var visit func(axis int, at int64)
		visit = func(axis int, at int64) {
			if axis < len(dims) {
				for i := range dims[axis] {
					visit(axis+1, at+i*strides[axis])
				}
				return
			}
			if (at+1)*width > int64(len(storage)) {
				fits = false
				return
			}
			want = append(want, storage[at*width:(at+1)*width]...)
		}
		visit(0, offset)

		config := fmt.Sprintf(`{"config": {"a": {"path_name": "s", "is_param": false, "use_pickle": false, "tensor_meta":
{"dtype": %d, "sizes": %s, "strides": %s, "storage_offset": {"as_int": %d}, "layout": 7, "device": {"type": "cpu"}}}}}`,
			kind, sizesText(dims), sizesText(strides), offset)
		members := goodMembers(goodProgram, goodWeights)
		members[2].data = config
		members = append(members, member{name: "m/data/constants/s", data: string(storage)})
		a, err := Parse("views", zipped(true, members...))
		if !fits {
			if err == nil || !strings.Contains(err.Error(), "does not fit") {
				t.Fatalf("%v %v %d: %v", dims, strides, offset, err)
			}
			return
		}
		if err != nil {
			t.Fatal(err)
		}
		x, err := a.Tensor("a")
		if err != nil {
			t.Fatal(err)
		}
		got, err := x.Bytes()
		if err != nil || !bytes.Equal(got, want) {
			t.Fatalf("%v %v %d: %v, want %v; %v", dims, strides, offset, got, want, err)
		}
		numbers := make([]float32, x.Shape().Elements())
		if err := x.Read(numbers); (err == nil) != (kind != 11) || err != nil && diag.From(err).Code != codeType {
			t.Fatal(err)
		}
		for i, v := range numbers {
			one := want[int64(i)*width : int64(i+1)*width]
			if w := float32(kinds[kind].Value(one)); kind != 11 && v != w && (v == v || w == w) {
				t.Fatalf("element %d of %s is %v, not %v", i, kinds[kind], v, w)
			}
		}
	})
}

// Names are one tensor if storage, offset, dimensions, strides and type agree, and not otherwise.
func TestTied(t *testing.T) {
	text := goodProgram
	for i, name := range []string{"b", "c", "d", "e"} {
		text = swap(text, `{"inputs": [`, fmt.Sprintf(`{"inputs": [{"as_tensor": {"name": "%s"}}, `, name))
		text = swap(text, `"input_specs": [`, fmt.Sprintf(`"input_specs": [{"parameter": {"arg": {"name": "%s"}, "parameter_name": "n.%s"}}, `, name, name))
		dims := [][]int64{{2, 3}, {3, 2}, {2, 3}, {2, 3}}[i]
		text = swap(text, `"tensor_values": {`, fmt.Sprintf(`"tensor_values": {"%s": {"dtype": %d, "sizes": %s}, `, name, []int{7, 7, 4, 7}[i], sizesText(dims)))
	}
	entry := func(name string, kind int, dims, strides []int64, offset int) string {
		return fmt.Sprintf(`"n.%s": {"path_name": "weight_0", "tensor_meta": {"dtype": %d, "sizes": %s, "strides": %s, "storage_offset":
{"as_int": %d}, "layout": 7}}, `, name, kind, sizesText(dims), sizesText(strides), offset)
	}
	config := swap(goodWeights, `{"config": {`, `{"config": {`+entry("b", 7, []int64{2, 3}, []int64{3, 1}, 0)+
		entry("c", 7, []int64{3, 2}, []int64{2, 1}, 0)+entry("d", 4, []int64{2, 3}, []int64{3, 1}, 0)+
		entry("e", 7, []int64{2, 3}, []int64{1, 2}, 0))
	a := must[*Archive](t)(Parse("tied", zipped(false, goodMembers(text, config)...)))
	if got := fmt.Sprint(a.Tied()); got != "[[n.b l.weight]]" {
		t.Errorf("tied: %s", got)
	}
}

// A tensor of several chunks is read whole, and a changed bit in the last is seen.
func TestChunks(t *testing.T) {
	const n = 3*chunk/2 + 7
	storage := make([]byte, 2*n)
	for i := range n {
		little.PutUint16(storage[2*i:], dtype.BF16FromF32(float32(i%200)))
	}
	members := goodMembers(goodProgram, goodWeights)
	members[2].data = fmt.Sprintf(`{"config": {"a": {"path_name": "s", "tensor_meta": {"dtype": 13, "sizes": [{"as_int": %d}],
"strides": [{"as_int": 1}], "layout": 7}}}}`, n)
	data := zipped(true, append(members, member{name: "m/data/constants/s", data: string(storage)})...)
	x := must[*Tensor](t)(must[*Archive](t)(Parse("chunks", data)).Tensor("a"))
	numbers := make([]float32, n)
	if err := x.Read(numbers); err != nil {
		t.Fatal(err)
	}
	for i, v := range numbers {
		if v != float32(i%200) {
			t.Fatalf("element %d is %v", i, v)
		}
	}
	if got := must[[]byte](t)(x.Bytes()); !bytes.Equal(got, storage) {
		t.Error("other bytes")
	}
	data[x.entry.at+2*n-1] ^= 1
	if err := x.Read(numbers); err == nil || !strings.Contains(err.Error(), "CRC") {
		t.Error(err)
	}
}

package flat

import (
	"bytes"
	"math"
	"reflect"
	"testing"
)

type leaf struct {
	Name string
	Bits []byte
}

type tree struct {
	leaf
	Leaf    leaf
	Yes     bool
	Int     int64
	Small   int8
	Uint    uint64
	Float   float64
	Single  float32
	Nil     *leaf
	Some    *leaf
	List    []*leaf
	Empty   []int
	None    []int
	Int32s  []int32
	Floats  []float32
	Doubles []float64
	Nested  [][]byte
	Pair    [2]int
	Map     map[string]*leaf
	Numbers map[int][]float32
	Any     map[string]any
}

func example() *tree {
	return &tree{
		Leaf: leaf{Name: "a"}, Yes: true, Int: math.MinInt64, Small: -128, Uint: math.MaxUint64,
		Float: math.Inf(-1), Single: math.SmallestNonzeroFloat32, Some: &leaf{Bits: []byte{}},
		List: []*leaf{{Name: "b"}, nil}, Empty: []int{}, Int32s: []int32{-1, 2},
		Floats: []float32{1, float32(math.Inf(1))}, Doubles: []float64{math.MaxFloat64},
		Nested: [][]byte{nil, {}, {1, 2}}, Pair: [2]int{3, -4},
		Map: map[string]*leaf{"x": {Name: "y"}, "z": nil}, Numbers: map[int][]float32{7: {8}, 9: nil},
		Any: map[string]any{"a": true, "b": 1, "c": int64(2), "d": 0.5, "e": "f", "g": nil},
	}
}

func TestValuesComeBack(t *testing.T) {
	var pipe bytes.Buffer
	want := example()
	for range 2 {
		if err := Write(&pipe, want); err != nil {
			t.Fatal(err)
		}
	}
	for range 2 {
		got := &tree{Nil: &leaf{}}
		if err := Read(&pipe, got); err != nil {
			t.Fatal(err)
		}
		if !reflect.DeepEqual(got, want) {
			t.Errorf("got  %+v\nwant %+v", got, want)
		}
	}
}

func TestNaNComesBack(t *testing.T) {
	b, err := Append(nil, []float64{math.NaN()})
	if err != nil {
		t.Fatal(err)
	}
	var got []float64
	if err := Parse(b, &got); err != nil || len(got) != 1 || !math.IsNaN(got[0]) {
		t.Errorf("got %v, %v", got, err)
	}
}

func TestWhatCannotBeSent(t *testing.T) {
	for _, v := range []any{struct{ F func() }{}, []any{leaf{}}, map[string]chan int{"a": nil}} {
		if b, err := Append(nil, v); err == nil {
			t.Errorf("%T gives %d bytes", v, len(b))
		}
	}
}

// Bytes that end early, or go on, are an error and no panic.
func FuzzParse(f *testing.F) {
	whole, err := Append(nil, example())
	if err != nil {
		f.Fatal(err)
	}
	f.Add(whole)
	for n := range whole {
		f.Add(whole[:n])
		if Parse(whole[:n], &tree{}) == nil {
			f.Errorf("%d bytes of %d are a value", n, len(whole))
		}
	}
	if Parse(append(whole, 0), &tree{}) == nil {
		f.Error("a byte too many is not noticed")
	}
	f.Fuzz(func(_ *testing.T, data []byte) { _ = Parse(data, &tree{}) })
}

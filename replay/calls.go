package replay

import (
	"bytes"
	"encoding/json"
	"math"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
)

// A callRule rewrites calls of one target. It gives the results of a call, without its workspace.
type callRule func(*writer, *site) []*value

// calls has a row for each custom call target that replay knows.
func calls() map[string]callRule {
	return map[string]callRule{
		"__cublas$gemm":               (*writer).gemm,
		"__cublas$lt$matmul":          (*writer).gemm,
		"__cudnn$blockScaledDot":      (*writer).blockScaledDot,
		"__cudnn$fmhaSoftmax":         (*writer).attention,
		"__cudnn$fmhaSoftmaxBackward": (*writer).attentionGrad,
		"__gpu$xla.gpu.triton":        (*writer).triton,
		"AllocateBuffer":              (*writer).allocated,
	}
}

// customCall rewrites a call of a library. What the rule does not return is workspace: zeros.
func (w *writer) customCall(s *site) *value {
	rewrite, ok := w.calls[s.target]
	if !ok {
		w.refuse(diag.ReplayCall, "replay has no rule for the custom call %s", s.target)
	}
	w.used[s.target]++
	for _, c := range Conventions() {
		if slices.Contains(c.Targets, s.target) {
			w.trusted[c.Name] = true
		}
	}
	out := rewrite(w, s)
	shapes := s.shape.results()
	for i, v := range out {
		w.sameShape(s, v, shapes, i)
	}
	if !s.shape.isTuple() {
		return out[0]
	}
	rest := shapes[len(out):]
	if len(rest) > 1 || len(rest) == 1 && (rest[0].typ != typeU8 && rest[0].typ != typeS8 ||
		len(rest[0].dims) != 1) {
		w.refuse(diag.ReplayCall, "%s has %d results that replay does not know", s.target, len(rest))
	}
	for _, e := range rest {
		out = append(out, w.fullInt(w.hold(e.typ), e.dims, 0))
	}
	return w.tuple(out...)
}

// sameShape holds a result of a rule to the shape of the call.
func (w *writer) sameShape(s *site, v *value, shapes []*shape, i int) {
	if i >= len(shapes) {
		w.refuse(diag.ReplayCall, "%s has %d results", s.target, len(shapes))
	}
	if want := w.held(shapes[i]); !equalShapes(v.shape, want) {
		w.refuse(diag.ReplayCall, "result %d of %s has dimensions %v; the rule gives %v", i, s.target,
			want.dims, v.shape.dims)
	}
}

func equalShapes(a, b *shape) bool {
	if a.typ != b.typ || len(a.dims) != len(b.dims) {
		return false
	}
	for i := range a.dims {
		if a.dims[i] != b.dims[i] {
			return false
		}
	}
	return true
}

// readConfig reads the part of a call's configuration that has a name. An unknown field may
// change what the call means, so it is refused.
func (w *writer) readConfig(s *site, name string, to any) {
	var parts map[string]json.RawMessage
	err := json.Unmarshal(s.config, &parts)
	if err == nil {
		d := json.NewDecoder(bytes.NewReader(parts[name]))
		d.DisallowUnknownFields()
		err = d.Decode(to)
	}
	if err != nil {
		w.refuse(diag.ReplayCall, "the configuration of %s: %s", s.target, err)
	}
}

// A number is an int64 as protobuf's JSON has it: quoted.
type number int64

// UnmarshalJSON reads a number with or without quotes.
func (n *number) UnmarshalJSON(text []byte) error {
	v, err := strconv.ParseInt(strings.Trim(string(text), `"`), 10, 64)
	*n = number(v)
	return err
}

// A dotConfig is DotDimensionNumbers in JSON.
type dotConfig struct {
	LHSContracting []number `json:"lhs_contracting_dimensions"`
	RHSContracting []number `json:"rhs_contracting_dimensions"`
	LHSBatch       []number `json:"lhs_batch_dimensions"`
	RHSBatch       []number `json:"rhs_batch_dimensions"`
}

func (d dotConfig) dims() dotDims {
	return dotDims{
		contracting: [2][]int64{ints(d.LHSContracting), ints(d.RHSContracting)},
		batch:       [2][]int64{ints(d.LHSBatch), ints(d.RHSBatch)},
	}
}

func ints(list []number) []int64 {
	out := make([]int64, len(list))
	for i, n := range list {
		out[i] = int64(n)
	}
	return out
}

// allocated is uninitialized memory, filled as the options say. It waits for its operands, and does
// not read them.
func (w *writer) allocated(s *site) []*value {
	if s.shape.isTuple() {
		w.refuse(diag.ReplayCall, "%s has several results", s.target)
	}
	return []*value{w.uninitialized(s.shape)}
}

// uninitialized is memory to which nothing was written, as the options fill it.
func (w *writer) uninitialized(shape *shape) *value {
	to := w.held(shape)
	switch {
	case w.options.Fill == Zeros || to.typ == typePred:
		return w.filled(to, 0)
	case w.options.Fill == NaNs && elemRows[to.typ].float:
		return w.full(shape.typ, to.dims, math.NaN())
	case w.options.Fill == NaNs:
		return w.filled(to, -1)
	}
	return w.scrambled(to)
}

// filled is an array of equal whole numbers.
func (w *writer) filled(to *shape, v int64) *value {
	return w.broadcast(w.convertExactly(w.scalarInt(typeS32, v), to.typ), to.dims)
}

// scrambled is an array of bits that look random: Knuth's multiplicative hash of each element's
// place. Elements of 64 bits have them in both halves.
func (w *writer) scrambled(to *shape) *value {
	n := elements(to.dims)
	x := w.elementwise("multiply", w.iota(typeU32, []int64{n}, 0),
		w.fullInt(typeU32, []int64{n}, 2654435761))
	x = w.elementwise("xor", x, w.elementwise("shift-right-logical", x,
		w.fullInt(typeU32, []int64{n}, 15)))
	bits := to.typ.bits()
	unsigned := map[int64]elemType{8: typeU8, 16: typeU16, 32: typeU32}[bits]
	if unsigned == 0 {
		pair := w.broadcast(x, []int64{n, 2}, 0)
		return w.reshape(w.add("bitcast-convert", exact(to.typ, n), nil, pair), to.dims...)
	}
	if bits < 32 { // the upper bits: a conversion must not saturate
		x = w.elementwise("shift-right-logical", x, w.fullInt(typeU32, []int64{n}, 32-bits))
	}
	return w.reshape(w.bitcastConvert(w.convertExactly(x, unsigned), to.typ), to.dims...)
}

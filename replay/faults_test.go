package replay

import (
	"encoding/json"
	"math"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/deepwell/deepwell/internal/lists"
	"github.com/deepwell/deepwell/internal/slowtest"
	"github.com/deepwell/deepwell/internal/wire"
	"github.com/deepwell/deepwell/step"
)

// A fault is one wrong instruction, as a compiler or Deepwell could have made it.
type fault struct {
	name string
	at   string // an opcode or a custom call target
	// plant changes the first instruction on which it has an effect, and says whether this is one. It
	// may give a value that replaces the instruction.
	plant func(w *writer, s *site) (bool, *value)
}

// once plants a fault in one instruction, and tells where.
func (f fault) once(where *string) edit {
	return func(w *writer, s *site) *value {
		if *where != "" || s.opcode != f.at && s.target != f.at {
			return nil
		}
		planted, v := f.plant(w, s)
		if planted {
			*where = s.name
		}
		return v
	}
}

// changed is a fault in a call's configuration. The instruction is one if f changes it.
func changed(part string, f func(config map[string]any) bool) func(*writer, *site) (bool, *value) {
	return func(_ *writer, s *site) (bool, *value) {
		var config map[string]map[string]any
		var whole map[string]any
		if json.Unmarshal(s.config, &whole) != nil {
			return false, nil
		}
		text, _ := json.Marshal(map[string]any{part: whole[part]})
		if json.Unmarshal(text, &config) != nil || !f(config[part]) {
			return false, nil
		}
		s.config, _ = json.Marshal(config)
		return true, nil
	}
}

// swapped is a call whose operands a and b are exchanged, where that fits.
func swapped(a, b int) func(*writer, *site) (bool, *value) {
	return func(_ *writer, s *site) (bool, *value) {
		if len(s.values) <= max(a, b) || !equalShapes(s.values[a].shape, s.values[b].shape) {
			return false, nil
		}
		s.values[a], s.values[b] = s.values[b], s.values[a]
		s.from[a], s.from[b] = s.from[b], s.from[a]
		return true, nil
	}
}

// lengthened is a call with the mask PADDING that sees a chunk more than the length at an operand.
func lengthened(at int) func(*writer, *site) (bool, *value) {
	return func(w *writer, s *site) (bool, *value) {
		if len(s.values) != at+1 {
			return false, nil
		}
		x := s.values[at]
		chunk := s.values[0].shape.dims[1]
		s.values[at] = w.elementwise("add", x, w.fullInt(typeS32, x.shape.dims, chunk))
		return true, nil
	}
}

// rotated moves the elements of a dimension by n, the first ones to its end.
func rotated(w *writer, x *value, along int, n int64) *value {
	part := func(from, to int64) *value {
		var attrs wire.Msg
		dims := slices.Clone(x.shape.dims)
		for i, d := range x.shape.dims {
			lo, hi := int64(0), d
			if i == along {
				lo, hi = from, to
			}
			dims[i], attrs = hi-lo, attrs.Bytes(17, wire.Msg(nil).Int(1, lo).Int(2, hi).Int(3, 1))
		}
		return w.add("slice", exact(x.shape.typ, dims...), attrs, x)
	}
	return w.add("concatenate", exact(x.shape.typ, x.shape.dims...), dimensions(int64(along)),
		part(n, x.shape.dims[along]), part(0, n))
}

const gemmPart, attentionPart = "gemm_backend_config", "cudnn_fmha_backend_config"

// faults has one row for each kind of call, collective and view, and more for those with most ways
// to be wrong.
var faults = []fault{
	{"contracting dimension", "__cublas$lt$matmul", func(w *writer, s *site) (bool, *value) {
		d := s.values[0].shape.dims
		if len(d) != 2 || d[0] != d[1] {
			return false, nil
		}
		return changed(gemmPart, func(g map[string]any) bool {
			dims := g["dot_dimension_numbers"].(map[string]any)
			was := dims["lhs_contracting_dimensions"].([]any)[0]
			dims["lhs_contracting_dimensions"] = []string{map[any]string{"0": "1", "1": "0"}[was]}
			return true
		})(w, s)
	}},
	{"beta ignored", "__cublas$lt$matmul", func(w *writer, s *site) (bool, *value) {
		ok, _ := changed(gemmPart, func(g map[string]any) bool {
			was := g["beta"]
			g["beta"] = 0
			return was != 0.0 && g["epilogue"] == "DEFAULT"
		})(w, s)
		if ok {
			s.values, s.from = s.values[:2], s.from[:2]
		}
		return ok, nil
	}},
	{"bias ignored", "__cublas$lt$matmul", func(w *writer, s *site) (bool, *value) {
		ok, _ := changed(gemmPart, func(g map[string]any) bool {
			was := g["epilogue"].(string)
			g["epilogue"] = strings.Replace(strings.TrimPrefix(was, "BIAS_"), "BIAS", "DEFAULT", 1)
			return was != g["epilogue"]
		})(w, s)
		if n := len(s.values) - 1; ok {
			s.values, s.from = s.values[:n], s.from[:n]
		}
		return ok, nil
	}},
	{"alpha 1 % too large", "__cublas$gemm", changed(gemmPart, func(g map[string]any) bool {
		g["alpha_real"] = 1.01 * g["alpha_real"].(float64)
		return true
	})},
	{"scales swapped", "__cudnn$blockScaledDot", swapped(2, 3)},
	{"scales not in tiles", "__cudnn$blockScaledDot", func(w *writer, s *site) (bool, *value) {
		d := s.values[2].shape.dims
		cols := d[len(d)-1]
		x := w.reshape(s.values[2], elements(d)/(tileRows*cols), 4, tileRows/4, cols/tileCols, tileCols)
		s.values[2] = w.reshape(w.transpose(x, 0, 3, 2, 1, 4), d...)
		return true, nil
	}},
	{"attention scale 1 % too large", "__cudnn$fmhaSoftmax", changed(attentionPart,
		func(g map[string]any) bool {
			g["fmha_scale"] = 1.01 * g["fmha_scale"].(float64)
			return true
		})},
	{"mask ignored", "__cudnn$fmhaSoftmax", changed(attentionPart, func(g map[string]any) bool {
		was := g["mask_type"]
		g["mask_type"], g["sliding_window_length"] = "NO_MASK", 0
		return was == "CAUSAL"
	})},
	{"window one too short", "__cudnn$fmhaSoftmax", changed(attentionPart,
		func(g map[string]any) bool {
			was := g["sliding_window_length"].(float64)
			g["sliding_window_length"] = was - 1
			return was > 1
		})},
	{"length of the next chunk", "__cudnn$fmhaSoftmax", lengthened(4)},
	{"length of the next chunk backward", "__cudnn$fmhaSoftmaxBackward", lengthened(7)},
	{"keys and values swapped", "__cudnn$fmhaSoftmax", swapped(1, 2)},
	{"chunks of keys swapped", "__cudnn$fmhaSoftmax", func(w *writer, s *site) (bool, *value) {
		d := s.values[1].shape.dims // [batch · chunks, keys, heads, head]
		if d[0]%2 > 0 {
			return false, nil
		}
		x := w.reshape(s.values[1], append([]int64{d[0] / 2, 2}, d[1:]...)...)
		s.values[1] = w.reshape(rotated(w, x, 1, 1), d...)
		return true, nil
	}},
	{"dO and O swapped", "__cudnn$fmhaSoftmaxBackward", swapped(4, 5)},
	{"log-sum-exp of base 2", "__cudnn$fmhaSoftmaxBackward", func(w *writer, s *site) (bool, *value) {
		x := s.values[3]
		s.values[3] = w.elementwise("multiply", x, w.full(typeF32, x.shape.dims, math.Log2E))
		return true, nil
	}},
	{"window ignored backward", "__cudnn$fmhaSoftmaxBackward", changed(attentionPart,
		func(g map[string]any) bool {
			was := g["sliding_window_length"].(float64)
			g["sliding_window_length"] = 0
			return was > 0
		})},
	{"devices swapped", "all-gather", func(_ *writer, s *site) (bool, *value) {
		lists := slices.Clone(s.groups.lists)
		lists[0] = slices.Clone(lists[0])
		lists[0][0], lists[0][1] = lists[0][1], lists[0][0]
		s.groups.lists = lists
		return true, nil
	}},
	{"scatter not summed", "reduce-scatter", func(w *writer, s *site) (bool, *value) {
		var out []*value
		for i, to := range s.shape.results() {
			out = append(out, w.slice(s.values[i], to.dims...))
		}
		return true, w.together(s, out)
	}},
	{"not reduced", "all-reduce", func(w *writer, s *site) (bool, *value) {
		return true, w.together(s, s.values)
	}},
	{"one group for all", "all-reduce", func(w *writer, s *site) (bool, *value) {
		// Any maximum that is large enough serves a softmax.
		reducer := w.src.computations[s.called[0]]
		if len(s.groups.lists) < 2 || reducer.find(reducer.rootID).opcode == "maximum" {
			return false, nil
		}
		s.groups.lists = nil
		return true, nil
	}},
	{"ring in the other direction", "collective-permute", func(_ *writer, s *site) (bool, *value) {
		var pairs wire.Msg
		var err error
		for f := range wire.Fields(s.kept, &err) {
			var from, to int64
			if f.Num == 52 && (wire.Into{1: &from, 2: &to}).Read(f.B) == nil {
				pairs = pairs.Bytes(52, wire.Msg(nil).Int(1, to).Int(2, from))
			} else {
				pairs = append(pairs, f.Raw...)
			}
		}
		s.kept = pairs
		return true, nil
	}},
	{"halo one key late", "collective-permute", func(w *writer, s *site) (bool, *value) {
		d := s.values[0].shape.dims
		if len(d) < 2 || d[1]%2 == 0 { // a window's halo is odd, a chunk is not
			return false, nil
		}
		s.values[0] = rotated(w, s.values[0], 1, 1)
		return true, nil
	}},
	{"not exchanged", "all-to-all", func(w *writer, s *site) (bool, *value) {
		return true, s.values[0]
	}},
	{"heads to the wrong devices", "all-to-all", func(w *writer, s *site) (bool, *value) {
		if len(s.dims) == 0 {
			return false, nil
		}
		x, along := s.values[0], int(s.dims[0])
		s.values[0] = rotated(w, x, along, x.shape.dims[along]/2)
		return true, nil
	}},
	{"exchanged chunks out of order", "all-to-all", func(w *writer, s *site) (bool, *value) {
		if len(s.dims) == 0 {
			return false, nil
		}
		v, along := w.allToAll(s), int(s.dims[0])
		return true, rotated(w, v, along, v.shape.dims[along]/2)
	}},
	{"layout ignored", "bitcast", func(_ *writer, s *site) (bool, *value) {
		from := *s.from[0].shape
		if from.rowMajor() || len(from.dims) < 2 {
			return false, nil
		}
		instruction := *s.from[0]
		from.layout, instruction.shape = nil, &from
		_ = from.check()
		s.from[0] = &instruction
		return true, nil
	}},
	{"high half byte first", "bitcast", func(w *writer, s *site) (bool, *value) {
		x := s.values[0]
		if s.shape.typ != typeE2M1 || x.shape.typ != typeU8 {
			return false, nil
		}
		four := w.fullInt(typeU8, x.shape.dims, 4)
		s.values[0] = w.elementwise("or", w.elementwise("shift-left", x, four),
			w.elementwise("shift-right-logical", x, four))
		return true, nil
	}},
	{"slice of the next layer", "dynamic-slice", func(w *writer, s *site) (bool, *value) {
		if !s.from[1].isCount() {
			return false, nil
		}
		s.values[1] = w.elementwise("subtract", s.values[1], w.scalarInt(s.values[1].shape.typ, 1))
		return true, nil
	}},
	{"async computation not applied", "async-start", func(w *writer, s *site) (bool, *value) {
		result := s.shape.elems[1] // ((operands), result, …)
		if len(s.values) != 1 || result.isTuple() ||
			!equalShapes(w.held(result), s.values[0].shape) {
			return false, nil
		}
		v := s.values[0]
		s.scope.started[s.id] = &started{func() *value { return v }}
		s.called = nil
		return true, v
	}},
}

// Each fault is seen far above the noise, in up to three examples that have such an instruction.
func TestFaultsAreFound(t *testing.T) {
	clean := map[string]float64{}
	for _, f := range slices.Concat(faults, expertFaults) {
		t.Run(f.name, func(t *testing.T) {
			planted := 0
			for _, x := range examples() {
				var where string
				m, err := rewrite("hlo", x.code, Options{Wide: true}, f.once(&where))
				if err != nil {
					t.Fatalf("%s: %v", x.name, err)
				}
				if where == "" || planted == 3 {
					continue
				}
				planted++
				noise, ok := clean[x.name]
				if !ok {
					right, err := Rewrite("hlo", x.code, Options{Wide: true})
					if err != nil {
						t.Fatal(err)
					}
					noise, _ = x.distance(execute(t, right, x))
					clean[x.name] = noise
				}
				if d, _ := x.distance(execute(t, m, x)); !(d > 100*noise && d > 1e-3) {
					t.Errorf("%s: the result differs by %.1e, noise is %.1e", x.name, d, noise)
				}
			}
			if planted == 0 {
				t.Error("no example has such an instruction")
			}
		})
	}
}

// Faults are found in the programs of a step too: one device, FSDP, a ring and exchanged heads in
// bf16, and MXFP8; and in evaluations, which give nothing but a loss. Each is planted in the first gradient and in
// the first evaluation that has such an instruction.
func TestFaultsInPrograms(t *testing.T) {
	slowtest.Only(t)
	r := runner(t)
	planted := map[step.Kind]map[string]bool{step.Gradient: {}, step.Evaluate: {}}
	var wg sync.WaitGroup
	for _, c := range []struct {
		kind                step.Kind
		model, format, plan string
	}{
		{step.Gradient, "llama", "bf16", "one"}, {step.Gradient, "llama", "bf16", "fsdp8"},
		{step.Gradient, "llama", "bf16", "cp4 ring fsdp2"}, {step.Gradient, "llama", "mxfp8", "one"},
		{step.Gradient, "qwen3 windows", "bf16", "cp2 gather balanced fsdp4"},
		{step.Gradient, "llama", "bf16", "cp2 a2a fsdp4"},
		{step.Evaluate, "llama", "mxfp8", "fsdp8 of 3 layers"},
		{step.Evaluate, "llama", "bf16", "tp2 fsdp4"},
		{step.Evaluate, "llama", "bf16", "cp4 ring fsdp2"},
		{step.Evaluate, "llama", "bf16", "cp4 a2a2 ring2 fsdp2"},
	} {
		p := programOf(t, c.model, c.kind, c.format, c.plan)
		names, programs := plantAll(t, r, p, faults, planted[c.kind])
		wg.Go(func() { findAll(t, r, p, names, programs) })
	}
	wg.Wait()
	for kind, least := range map[step.Kind]int{step.Gradient: 20, step.Evaluate: 14} {
		t.Logf("%d of %d faults fit into programs of kind %s", len(planted[kind]), len(faults), kind)
		if len(planted[kind]) < least {
			t.Errorf("only %d faults were planted: %v", len(planted[kind]), planted[kind])
		}
	}
}

// gradient is the gradient program of Llama with a plan of the table.
func gradient(t *testing.T, format, plan string) Pair {
	t.Helper()
	return programOf(t, "llama", step.Gradient, format, plan)
}

// programOf is the first program of a kind of a model with a plan of the table.
func programOf(t *testing.T, model string, kind step.Kind, format, plan string) Pair {
	t.Helper()
	row := lists.Find(planRows(), func(p planRow) bool { return p.name == plan })
	list, err := cases(model, format, row)
	if err != nil {
		t.Fatal(err)
	}
	return lists.Find(list, func(c testCase) bool { return c.pair.Kind == kind }).pair
}

// plantAll compiles a program and plants each fault that fits and stands in no program yet.
func plantAll(t *testing.T, r *Runner, p Pair, faults []fault, planted map[string]bool) (
	names []string, programs []*Module) {
	format, code, err := r.Compile(t.Context(), p.GPU, p.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	for _, f := range faults {
		if planted[f.name] {
			continue
		}
		var where string
		m, err := rewrite(format, code, Options{Wide: true}, f.once(&where))
		if err != nil {
			t.Fatalf("%s: %v", f.name, err)
		}
		if where != "" {
			names, programs, planted[f.name] = append(names, f.name), append(programs, m), true
		}
	}
	return names, programs
}

// findAll runs programs with faults beside one reference. Each must be far beyond its bound.
func findAll(t *testing.T, r *Runner, p Pair, names []string, programs []*Module) {
	results, err := r.Run(t.Context(), p, true, programs...)
	if err != nil {
		t.Error(err)
		return
	}
	for i, one := range results {
		worst := one.Worst()
		t.Logf("%s in %s: %.1e (%s)", names[i], p.GPU.Name, worst.Relative, worst.Name)
		if !(worst.Relative > 5*p.Bound(true).Limit) {
			t.Errorf("%s is not seen: %s", names[i], one.Summary())
		}
	}
}

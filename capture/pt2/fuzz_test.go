package pt2

import (
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

func coded(t *testing.T, err error) {
	t.Helper()
	if e := diag.From(err); e.Code != codeFormat || e.Fix == "" {
		t.Errorf("%v", err)
	}
}

// Any bytes give an archive that can be used, or an error with a code.
func FuzzParse(f *testing.F) {
	for _, row := range hostiles() {
		if len(row.data) < 8192 {
			f.Add(row.data)
		}
	}
	for _, name := range []string{"storages", "meta"} {
		f.Add(unpack(f, name+".pt2"))
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		a, err := Parse("fuzz", data)
		if err != nil {
			coded(t, err)
			return
		}
		exercise(t, a)
	})
}

// The same for the text of a program, which a CRC protects from the bytes above.
func FuzzProgram(f *testing.F) {
	f.Add(goodProgram)
	for _, name := range []string{"storages", "meta"} {
		a := open(f, name)
		root := must[string](f)(findRoot(a.zip.names()))
		f.Add(must[string](f)(a.zip.text(root+programName, maxText)))
	}
	for _, arm := range []string{`{"as_sym_ints": [{"as_int": 1}]}`, `{"as_device": {"type": "cuda", "index": 0}}`,
		`{"as_float": "-Infinity"}`, `{"as_complex": {"real": 1, "imag": "NaN"}}`, `{"as_nested_tensors": [[{"name": "x"}]]}`,
		`{"as_optional_tensors": [{"as_none": true}, {"as_tensor": {"name": "x"}}]}`,
		`{"as_graph": {"name": "g", "graph": {"inputs": [{"as_sym_int": {"as_name": "n"}}], "outputs": [{"as_sym_int": {"as_name": "n"}}],
"sym_int_values": {"n": {"as_expr": {"expr_str": "Symbol('u0')"}}}}}}`} {
		f.Add(swap(goodProgram, arg, arm))
	}
	f.Fuzz(func(t *testing.T, text string) {
		p, err := parseProgram(strings.ToValidUTF8(text, ""))
		if err != nil {
			coded(t, inMember(err, programName))
			return
		}
		if len(p.Inputs) != len(p.Graph.Inputs) || len(p.Outputs) != len(p.Graph.Outputs) {
			t.Error("the signature has other lengths than the graph")
		}
		_ = printed(p)
	})
}

// Any list of tensors gives views within their storage.
func FuzzConfig(f *testing.F) {
	for _, row := range hostileTensors() {
		if z, err := openZip(strings.NewReader(string(row.data)), int64(len(row.data))); err == nil {
			if text, err := z.text("m/"+weightsName, maxText); err == nil {
				f.Add(text)
			}
		}
	}
	f.Fuzz(func(t *testing.T, text string) {
		if a, err := Parse("fuzz", zipped(false, goodMembers(goodProgram, strings.ToValidUTF8(text, ""))...)); err != nil {
			coded(t, err)
		} else {
			exercise(t, a)
		}
	})
}

// Any text is an expression or not; what is one can be printed and evaluated.
func FuzzExpr(f *testing.F) {
	for _, text := range []string{"Mul(Integer(64), Symbol('s72', positive=True, integer=True))", "Min(Integer(8), Pow(Symbol('s1'), Integer(2)))",
		"Where(Equality(Symbol('s1'), Integer(-4)), Mod(Integer(3), Integer(0)), true)", "Float('0.5', precision=53)", "Rational(1, 2)"} {
		f.Add(text, int64(3))
	}
	f.Fuzz(func(_ *testing.T, text string, v int64) {
		e, err := parseExpr(text)
		if err != nil {
			return
		}
		symbols := map[string]int64{}
		for _, s := range e.Symbols() {
			symbols[s] = v
		}
		_, _ = e.Eval(symbols)
		_ = e.String()
	})
}

// Any tree gives names that can be printed, or nil.
func FuzzTree(f *testing.F) {
	f.Add(`[1, {"type": "builtins.dict", "context": "[\"loss\", \"logits\"]", "children_spec": [{"type": null, "context": null,
"children_spec": []}, {"type": "builtins.tuple", "context": "null", "children_spec": [{"type": null}]}]}]`)
	f.Add(`[1, {"type": null}]`)
	f.Fuzz(func(t *testing.T, text string) {
		for _, name := range leaves(strings.ToValidUTF8(text, "")) {
			if len(name) > maxPath+1 || strings.ContainsAny(name, "\x00\x1b\n") {
				t.Errorf("%q", name)
			}
		}
	})
}

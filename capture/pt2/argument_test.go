package pt2

import (
	"fmt"
	"math"
	"reflect"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/dtype"
)

// Every kind of argument of the schema has its Go type.
func TestArguments(t *testing.T) {
	s1 := Expr{Op: opSymbol, Name: "s1"}
	text := swap(goodProgram, `"sym_int_values": {}`, `"sym_int_values": {"n": {"as_expr": {"expr_str": "Symbol('s1')", "hint": null}}, "m": {"as_int": 5}}`)
	text = swap(text, `"sym_bool_values": {}`, `"sym_bool_values": {"b": {"as_bool": true}}, "sym_float_values": {"f": {"as_float": 0.5}}`)
	for _, row := range []struct {
		text string
		want Argument
	}{
		{`{"as_none": true}`, nil},
		{`{"as_tensor": {"name": "x"}}`, Ref("x")},
		{`{"as_tensors": [{"name": "x"}, {"name": "w"}]}`, []Ref{"x", "w"}},
		{`{"as_tensors": []}`, []Ref{}},
		{`{"as_nested_tensors": [[{"name": "x"}], []]}`, [][]Ref{{"x"}, {}}},
		{`{"as_optional_tensor": {"as_none": true}}`, nil},
		{`{"as_optional_tensor": {"as_tensor": {"name": "x"}}}`, Ref("x")},
		{`{"as_optional_tensors": [{"as_none": true}, {"as_tensor": {"name": "x"}}]}`, []Ref{"", "x"}},
		{`{"as_int": -9223372036854775808}`, int64(math.MinInt64)},
		{`{"as_ints": [9223372036854775807, 0]}`, []int64{math.MaxInt64, 0}},
		{`{"as_int_lists": [[1], []]}`, [][]int64{{1}, {}}},
		{`{"as_float": 1e-05}`, 1e-5},
		{`{"as_float": "Infinity"}`, math.Inf(1)},
		{`{"as_floats": [1, "-Infinity"]}`, []float64{1, math.Inf(-1)}},
		{`{"as_float_lists": [[0.5]]}`, [][]float64{{0.5}}},
		{`{"as_bool": false}`, false},
		{`{"as_bools": [true]}`, []bool{true}},
		{`{"as_string": "bqhd,bkhd->bhqk"}`, "bqhd,bkhd->bhqk"},
		{`{"as_strings": ["a", "b"]}`, []string{"a", "b"}},
		{`{"as_operator": "add"}`, "add"},
		{`{"as_complex": {"real": 1, "imag": -2.5}}`, complex(1, -2.5)},
		{`{"as_scalar_type": 13}`, dtype.BF16},
		{`{"as_device": {"type": "cuda", "index": 1}}`, Word("cuda:1")},
		{`{"as_device": {"type": "cpu", "index": null}}`, Word("cpu")},
		{`{"as_layout": 7}`, Word("strided")},
		{`{"as_memory_format": 4}`, Word("preserve")},
		{`{"as_sym_int": {"as_name": "n"}}`, s1},
		{`{"as_sym_int": {"as_name": "m"}}`, integer(5)},
		{`{"as_sym_int": {"as_int": 3}}`, int64(3)},
		{`{"as_sym_ints": [{"as_name": "n"}, {"as_int": -1}]}`, []Expr{s1, integer(-1)}},
		{`{"as_sym_bool": {"as_name": "b"}}`, Expr{Op: "true"}},
		{`{"as_sym_bools": [{"as_bool": false}]}`, []Expr{{Op: "false"}}},
		{`{"as_sym_float": {"as_name": "f"}}`, Expr{Op: "Float", Name: "0.5"}},
		{`{"as_sym_floats": [{"as_float": 2.0}]}`, []Expr{{Op: "Float", Name: "2"}}},
		{`{"as_string_to_argument": {"a": {"as_sym_int": {"as_name": "n"}}}}`, map[string]Argument{"a": s1}},
		{`{"as_graph": {"name": "g", "graph": {"inputs": [], "outputs": [], "nodes": []}}}`,
			&Graph{Name: "g", Values: map[string]Value{}}},
	} {
		p, err := parseProgram(swap(text, arg, row.text))
		if err != nil {
			t.Errorf("%s: %v", row.text, err)
			continue
		}
		n := p.Graph.Nodes[0]
		if got, ok := n.Arg("extra"); !ok || !reflect.DeepEqual(got, row.want) {
			t.Errorf("%s is %#v, want %#v", row.text, got, row.want)
		}
		if !n.Args[2].Keyword || n.Args[0].Keyword {
			t.Error(n.Args)
		}
	}
	p := must[*Program](t)(parseProgram(swap(text, arg, `{"as_float": "NaN"}`)))
	if got, _ := p.Graph.Nodes[0].Arg("extra"); !math.IsNaN(got.(float64)) {
		t.Error(got)
	}
	if _, ok := p.Graph.Nodes[0].Arg(""); ok {
		t.Error("an argument without a name was found")
	}
	for name, want := range map[string]dtype.DType{"n": dtype.S64, "m": dtype.S64, "b": dtype.Pred, "f": dtype.F64} {
		if v := p.Graph.Values[name]; v.Type != want || v.Sym == nil || v.Dims != nil {
			t.Errorf("%s: %+v", name, v)
		}
	}
}

// What a node gives is a list of names, whatever kinds of outputs it has.
func TestResults(t *testing.T) {
	const out = `"outputs": [{"as_tensor": {"name": "y"}}], "metadata"`
	for text, want := range map[string]string{
		`{"as_tensors": [{"name": "y"}, {"name": "z"}]}`:                       "y z",
		`{"as_tensor": {"name": "y"}}, {"as_none": true}`:                      "y ",
		`{"as_nested_tensors": [[{"name": "y"}], [{"name": "z"}]]}`:            "y z",
		`{"as_tensor": {"name": "y"}}, {"as_sym_int": {"as_name": "z"}}`:       "y z",
		`{"as_tensor": {"name": "y"}}, {"as_sym_ints": [{"as_name": "z"}]}`:    "y z",
		`{"as_tensor": {"name": "y"}}, {"as_sym_ints": [{"as_int": 3}]}`:       "!gives the number 3",
		`{"as_tensor": {"name": "y"}}, {"as_int": 3}`:                          "!which is no value",
		`{"as_tensor": {"name": "y"}}, {"as_optional_tensor": {"as_none": 1}}`: "y ",
	} {
		p, err := parseProgram(swap(swap(goodProgram, out, `"outputs": [`+text+`], "metadata"`),
			`"tensor_values": {`, `"tensor_values": {"z": {"dtype": 7, "sizes": []}, `))
		if words, bad := strings.CutPrefix(want, "!"); bad {
			if err == nil || !strings.Contains(err.Error(), words) {
				t.Errorf("%s: %v", text, err)
			}
			continue
		}
		if err != nil {
			t.Errorf("%s: %v", text, err)
			continue
		}
		if got := strings.Trim(fmt.Sprint(p.Graph.Nodes[0].Outputs), "[]"); got != want {
			t.Errorf("%s gives %q", text, got)
		}
	}
}

func TestPlaces(t *testing.T) {
	p := must[*Program](t)(parseProgram(swap(goodProgram, "L__self__,,M",
		"L__self__,,a.M;L__self__h@1,h,torch.nn.modules.container.ModuleList;L['x, y'],h.0,b.Block")))
	want := []Module{{"L__self__", "", "a.M"}, {"L__self__h@1", "h", "torch.nn.modules.container.ModuleList"},
		{"L['x, y']", "h.0", "b.Block"}}
	if n := p.Graph.Nodes[0]; !reflect.DeepEqual(n.Modules, want) || n.Source != "m.py:7" ||
		n.Name != "linear" || n.Target != "aten.linear.default" {
		t.Errorf("%+v", n)
	}
	for trace, want := range map[string]string{
		"":         "",
		"nonsense": "",
		"File \"/home/me/x/model.py\", line 12, in forward\n    return f(x)\n  File \"/usr/lib/site-packages/torch/nn/linear.py\", line 9, in forward": "model.py:12",
		"File \"torch/fx/passes/runtime_assert.py\", line 24, in insert":                                                                               "",
		"File \"C:\\\\me\\\\model.py\", line 3, in f":                                                                                                  "model.py:3",
		"File \"/a/one.py\", line 1, in f\n  File \"/a/two.py\", line 22, in g\n    x = \"File \\\"":                                                   "two.py:22",
		"File \"/a/\x1b[2J.py\", line 1, in f":                                                                                                         "",
		"File \"/a/b.py\", line 99999999999999999999, in f":                                                                                            "",
	} {
		if got := sourceOf(trace); got != want {
			t.Errorf("%q: %q, want %q", trace, got, want)
		}
	}
}

// Inputs and outputs have the names by which the caller knows them.
func TestNames(t *testing.T) {
	const leaf = `{"type": null, "context": null, "children_spec": []}`
	tree := func(kind, context string, children ...string) string {
		return fmt.Sprintf(`{"type": %q, "context": %q, "children_spec": [%s]}`, kind, context, strings.Join(children, ", "))
	}
	for text, want := range map[string]string{
		`[1, ` + leaf + `]`: "",
		`[1, ` + tree("builtins.tuple", "null", leaf, tree("builtins.list", "null", leaf, leaf)) + `]`:          "0 1.0 1.1",
		`[1, ` + tree("transformers.x.Output", `["loss", "logits"]`, leaf, tree("d", `["a"]`, leaf)) + `]`:      "loss logits.a",
		`[1, ` + tree("collections.defaultdict", `[null, ["a"]]`, leaf) + `]`:                                   "0",
		`[1, ` + tree("builtins.dict", `["\u001b"]`, leaf) + `]`:                                                "0",
		`[1, ` + strings.Repeat(`{"type": "a", "children_spec": [`, 99) + leaf + strings.Repeat("]}", 99) + `]`: "!",
		`[1]`: "!", `{}`: "!", ``: "!", `[1, {}] x`: "!", `[1, [2]]`: "!",
	} {
		got := leaves(text)
		if want == "!" {
			if got != nil {
				t.Errorf("%s: %q", text, got)
			}
			continue
		}
		if got == nil || strings.Join(got, " ") != want {
			t.Errorf("%s: %q", text, got)
		}
	}
	spec := fmt.Sprintf("%q", `[1, `+tree("builtins.tuple", "null", tree("builtins.tuple", "null", leaf), tree("builtins.dict", "[]"))+`]`)
	p := must[*Program](t)(parseProgram(swap(goodProgram, `"module_call_graph": []`,
		`"module_call_graph": [{"fqn": "", "signature": {"in_spec": `+spec+`, "out_spec": "[1, null]", "forward_arg_names": ["ids"]}}, {"fqn": "l", "signature": null}]`)))
	if p.Inputs[1].Name != "ids" || p.Outputs[0].Name != "0" || p.Inputs[0].Name != "l.weight" {
		t.Errorf("%+v %+v", p.Inputs, p.Outputs)
	}
}

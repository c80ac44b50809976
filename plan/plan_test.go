package plan_test

import (
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"
	"unicode"

	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/ir"
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/plan"
)

// A plan prints as it was written, and a printed plan reads back as itself.
func TestGolden(t *testing.T) {
	files, err := filepath.Glob("testdata/*.json")
	examples, _ := filepath.Glob("../examples/plans/*.json")
	if err != nil || len(files) == 0 || len(examples) == 0 {
		t.Fatal("no golden files", err)
	}
	files = append(files, examples...)
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			t.Fatal(err)
		}
		p, err := plan.Parse(text, path)
		if err != nil {
			t.Fatal(err)
		}
		if golden.Update() && filepath.Dir(path) == "testdata" {
			if err := os.WriteFile(path, []byte(p.String()), 0o644); err != nil {
				t.Fatal(err)
			}
			continue
		}
		golden := filepath.Dir(path) == "testdata" // examples are as people write them
		if golden && p.String() != string(text) {
			t.Errorf("%s prints as\n%s", path, p)
		}
		preset, err := model.Find(p.Model)
		if err != nil {
			t.Fatal(err)
		}
		// What can only be priced yet prints and parses all the same.
		if err := p.Check(preset.Config); err != nil && diag.From(err).Code != diag.PlanLater {
			t.Errorf("%s: %v", path, err)
		}
	}
}

func TestRefusedText(t *testing.T) {
	for _, row := range []struct {
		text string
		code diag.Code
		says string
	}{
		{`{`, diag.PlanText, "not JSON"},
		{`{"seq": 8} {}`, diag.PlanText, "follows"},
		{`{"seq": 8} x`, diag.PlanText, "follows"},
		{`{"dp": 16777216, "fsdp": 16777216, "tp": 16777216}`, diag.PlanValue, "more than 16777216"},
		// The product is 1 modulo 2^64.
		{`{"dp": 31, "fsdp": 223, "tp": 233, "cp": 5503, "ep": 35677, "pp": 5308243}`,
			diag.PlanValue, "more than 16777216"},
		{`{"model": "a\u0000\u001b[31mb"}`, diag.PlanValue, "control character"},
		{`{"a\u001b[31mb": 1}`, diag.PlanKey, `a\x1b[31mb`},
		{`[]`, diag.PlanValue, "an object"},
		{`{"fspd": 8}`, diag.PlanKey, `did you mean "fsdp"?`},
		{`{"fsdp": {"sise": 8}}`, diag.PlanKey, `did you mean "size"?`},
		{`{"seq": 8, "seq": 9}`, diag.PlanKey, "twice"},
		{`{"seq": 0}`, diag.PlanValue, "from 1"},
		{`{"seq": 1.5}`, diag.PlanValue, "from 1"},
		{`{"seq": "8"}`, diag.PlanValue, `"8"`},
		{`{"seq": null}`, diag.PlanValue, "null"},
		{`{"fsdp": {"zero": 4}}`, diag.PlanValue, "1, 2 or 3"},
		{`{"fsdp": {"zero": 1, "gather": "layer"}}`, diag.PlanValue, "gather applies to zero 3 only"},
		{`{"fsdp": {"gather": "microbatch", "zero": 2}}`, diag.PlanValue, "no gather with zero 2"},
		{`{"zero": 3}`, diag.PlanKey, "it is fsdp.zero"},
		{`{"gather": "step"}`, diag.PlanKey, "it is fsdp.gather"},
		{`{"schedule": "1f1b"}`, diag.PlanKey, "it is pp.schedule"},
		{`{"virtual": 2}`, diag.PlanKey, "it is pp.virtual"},
		{`{"sequence": true}`, diag.PlanKey, "it is tp.sequence"},
		{`{"overlap": true}`, diag.PlanKey, "it is tp.overlap"},
		{`{"kind": "ring"}`, diag.PlanKey, "it is cp.kind"},
		{`{"balance": true}`, diag.PlanKey, "it is cp.balance"},
		{`{"cp": {"zero": 3}}`, diag.PlanKey, "the keys here are"},
		{`{"fsdp": {"gather": "layers"}}`, diag.PlanValue, `did you mean "layer"?`},
		{`{"tp": {"sequence": 1}}`, diag.PlanValue, "true or false"},
		{`{"pp": {"schedule": "1fb1"}}`, diag.PlanValue, `did you mean "1f1b"?`},
		{`{"recompute": ["attn", "attn"]}`, diag.PlanValue, "twice"},
		{`{"recompute": "attn"}`, diag.PlanValue, `"none", "full" or a list of`},
		{`{"offload": ["activation"]}`, diag.PlanValue, `did you mean "activations"?`},
		{`{"types": {"params": "f16"}}`, diag.PlanValue, "f32, bf16"},
		{`{"order": ["tp", "xp"]}`, diag.PlanValue, "one of"},
		{`{"precision": "mxfp9"}`, diag.PlanValue, `did you mean "mxfp8"?`},
		{`{"version": 9}`, diag.PlanVersion, "this binary reads 1"},
	} {
		_, err := plan.Parse([]byte(row.text), "plan.json")
		e, ok := errors.AsType[*diag.Error](err)
		if !ok || e.Code != row.code || !strings.Contains(e.Format(), row.says) ||
			!strings.HasPrefix(e.Where, "plan.json:1") {
			t.Errorf("%s: %v (%+v)", row.text, err, e)
		}
	}
}

func TestCheck(t *testing.T) {
	preset, err := model.Find("llama3.1-8b") // 32 layers, 32 heads, 8 key heads
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		text, says string // what is wrong and what would fit; "" for a sound plan
	}{
		{`{"cluster": "8xb200", "fsdp": 8, "batch": 8}`, ""},
		{`{"cluster": "16xb200", "tp": 16}`, ""}, // key heads are copied
		{`{"cluster": "8xb200", "fsdp": 4, "batch": 8}`, `"fsdp": 8`},
		{`{"cluster": "8xb200", "tp": 3}`, "product is 8"},
		{`{"cluster": "3xb200", "tp": 3}`, "tp can be 1, 2, 4, 8, 16, 32"},
		{`{"cluster": "8xb200", "fsdp": 8, "batch": 12}`, `"batch": 16`},
		{`{"cluster": "2xb200", "cp": 2, "seq": 7}`, `"seq": 8`},
		{`{"cluster": "4xb200", "microbatches": 4, "batch": 4, "pp": {"size": 4, "virtual": 2}}`,
			"take interleaved"},
		{`{"cluster": "4xb200", "microbatches": 4, "batch": 4, "pp": {"size": 4, "schedule": "zb-v"}}`, ""},
		{`{"cluster": "64xb200", "pp": 64}`, "at most 32"},
		{`{"cluster": "8xb200"}`, "the plan is for one device; the cluster has 8"},
		{`{"cluster": "8xb200", "pp": {"size": 8, "virtual": 16777216, "schedule": "interleaved"}}`,
			"more stages than a schedule holds"},
		{`{"cluster": "1xb200", "pp": {"size": 1, "virtual": 2}}`, "plan pp.virtual"},
		{`{"cluster": "2xb200", "pp": 2, "order": ["dp", "pp"]}`, `put "pp" first`},
		{`{"cluster": "2xb200", "tp": {"size": 2, "overlap": true}}`, `"batch": 2`},
		{`{"cluster": "2xb200", "seq": 2, "cp": {"size": 2, "kind": "ring"}}`, ""},
		{`{"cluster": "8xb200", "seq": 8, "tp": 2, "cp": {"size": 4, "kind": "a2a"}}`, ""},
		{`{"cluster": "64xb200", "seq": 64, "cp": {"size": 64, "kind": "a2a"}}`, "tp × cp a divisor of 32 heads"},
		{`{"cluster": "2xb200", "seq": 4, "cp": {"size": 2, "kind": "a2a", "balance": true}}`, "leave cp.balance out"},
		{`{"cluster": "8xb200", "seq": 8, "cp": {"size": 8, "kind": "a2a+ring", "inner": 4, "balance": true}}`, ""},
		{`{"cluster": "8xb200", "seq": 8, "cp": {"size": 8, "kind": "a2a+ring", "inner": 3}}`, "a divisor of cp between 2 and 4"},
		{`{"cluster": "8xb200", "seq": 8, "cp": {"size": 8, "kind": "a2a+ring"}}`, "plan cp.inner"},
		{`{"cluster": "8xb200", "seq": 8, "cp": {"size": 8, "kind": "ring", "inner": 4}}`, "leave cp.inner out"},
		{`{"cluster": "128xb200", "seq": 128, "cp": {"size": 128, "kind": "a2a+ring", "inner": 64}}`, "tp × cp.inner a divisor of 32"},
		{`{"cluster": "2xb200", "batch": 2, "ep": 2}`, "the model has none"},
		{`{"cluster": "1xb200", "slots": [2]}`, "the model has none"},
		{`{"cluster": "1xb200", "offload": ["optimizer"]}`, ""},
		{`{"cluster": "1xb200", "types": {"params": "bf16"}, "precision": "bf16"}`, ""},
		{`{"cluster": "1xb200", "precision": "bf16"}`, "need parameters in bf16"},
		{`{"cluster": "1xb200", "types": {"params": "bf16"}, "precision": "nvfp4"}`, "blocks of 16"},
		{`{"cluster": "1xb200", "types": {"params": "bf16"}, "precision": "fp8"}`, "fp8"},
		{`{"cluster": "1xb201"}`, "b200"},
	} {
		p, err := plan.Parse([]byte(row.text), "plan.json")
		if err != nil {
			t.Errorf("%s: %v", row.text, err)
			continue
		}
		err = p.Check(preset.Config)
		text := ""
		if e, ok := errors.AsType[*diag.Error](err); ok {
			text = e.Format()
		}
		if row.says == "" && err != nil || !strings.Contains(text, row.says) {
			t.Errorf("%s: %s", row.text, text)
		}
	}
}

// Every plan prints as something that reads back as the same plan.
func TestPrintsAndParsesItself(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		size := rapid.Int64Range(1, 4)
		printable := rapid.StringOf(rapid.RuneFrom(nil, unicode.L, unicode.N, unicode.P, unicode.S))
		p := plan.Default()
		p.Model, p.Cluster = printable.Draw(t, "model"), "8xb200"
		p.Seq, p.Batch = size.Draw(t, "seq"), size.Draw(t, "batch")
		p.DP, p.EP = size.Draw(t, "dp"), size.Draw(t, "ep")
		if n := size.Draw(t, "fsdp"); n > 1 {
			p.FSDP = plan.FSDP{Size: n, Zero: 3, Gather: rapid.SampledFrom([]string{"layer", "microbatch"}).Draw(t, "gather")}
		}
		if n := size.Draw(t, "tp"); n > 1 {
			p.TP = plan.TP{Size: n, Sequence: rapid.Bool().Draw(t, "sequence")}
		}
		if n := size.Draw(t, "cp"); n > 1 {
			p.CP = plan.CP{Size: n, Kind: rapid.SampledFrom([]string{"gather", "ring", "a2a"}).Draw(t, "kind"),
				Balance: rapid.Bool().Draw(t, "balance")}
			if n == 4 && rapid.Bool().Draw(t, "hierarchical") {
				p.CP.Kind, p.CP.Inner = "a2a+ring", 2
			}
		}
		if n := size.Draw(t, "pp"); n > 1 {
			p.PP = plan.PP{Size: n, Virtual: size.Draw(t, "virtual"), Schedule: "zb-v"}
		}
		if rapid.Bool().Draw(t, "recompute") {
			p.Recompute = []ir.Tag{ir.Attn, ir.MLP}
			p.Order = []string{"pp", "fsdp", "dp", "cp", "ep", "tp"}
		}
		p.Offload = rapid.SampledFrom([][]string{nil, {plan.Activations}, {plan.OptimizerState},
			{plan.Activations, plan.OptimizerState}}).Draw(t, "offload")
		p.Types.Params = rapid.SampledFrom([]dtype.DType{dtype.F32, dtype.BF16}).Draw(t, "params")
		p.Precision = rapid.SampledFrom([]string{"", "bf16", "mxfp8"}).Draw(t, "precision")
		q, err := plan.Parse([]byte(p.String()), "plan.json")
		if err != nil {
			t.Fatalf("%v\n%s", err, p)
		}
		if q.String() != p.String() || q.Devices() != p.Devices() {
			t.Fatalf("%s became %s", p, q)
		}
	})
}

// plan.json and run.toml have the same words for what is recomputed.
func TestRecomputeWords(t *testing.T) {
	for text, want := range map[string][]ir.Tag{`"none"`: nil, `"full"`: ir.BlockTags, `["attn"]`: {ir.Attn}} {
		p, err := plan.Parse([]byte(`{"version": 1, "recompute": `+text+`}`), "plan.json")
		if err != nil || !slices.Equal(p.Recompute, want) {
			t.Errorf("%s: %v, %v", text, p, err)
		}
	}
}

func FuzzParse(f *testing.F) {
	f.Add([]byte(`{"version": 1, "fsdp": {"size": 8, "zero": 2}, "recompute": ["attn"], "order": ["tp"]}`))
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := plan.Parse(text, "plan.json")
		if err != nil {
			return
		}
		q, err := plan.Parse([]byte(p.String()), "again.json")
		if err != nil || q.String() != p.String() {
			t.Errorf("%s became %v: %v", p, q, err)
		}
	})
}

func ExampleParse() {
	p, err := plan.Parse([]byte(`{"cluster": "8xb200", "batch": 16, "fsdp": 4, "tp": 2}`), "plan.json")
	if err != nil {
		fmt.Println(err)
		return
	}
	fmt.Println(p.Devices(), p.Mesh())
	// Output: 8 [{fsdp 4} {tp 2}]
}

// Layers that do not come out even leave the first stages one more.
func TestStages(t *testing.T) {
	p := plan.Default()
	p.PP = plan.PP{Size: 4, Schedule: "1f1b"}
	if got := fmt.Sprint(p.Stages(126)); got != "[32 32 31 31]" {
		t.Error(got)
	}
}

func TestLabel(t *testing.T) {
	for text, want := range map[string]string{
		`{}`:                   "",
		`{"fsdp": 8, "tp": 2}`: "fsdp 8 zero 3, tp 2",
		`{"dp": 2, "fsdp": {"size": 4, "zero": 1, "gather": "step"}, "pp": 2}`: "dp 2, fsdp 4 zero 1, pp 2",
		`{"fsdp": {"size": 4, "gather": "microbatch"}}`:                        "fsdp 4 zero 3/microbatch",
		`{"fsdp": {"size": 4, "gather": "step"}, "cp": 2}`:                     "fsdp 4 zero 3/step, cp 2",
	} {
		p, err := plan.Parse([]byte(text), "plan.json")
		if err != nil || p.Label() != want {
			t.Errorf("%s: %q, %v; want %q", text, p.Label(), err, want)
		}
	}
}

// Plans made in code ran with words that no file may have, or divided by zero.
func TestCheckOfPlansMadeInCode(t *testing.T) {
	preset, err := model.Find("llama3.1-8b")
	if err != nil {
		t.Fatal(err)
	}
	for _, row := range []struct {
		change func(p *plan.Plan)
		says   string
	}{
		{func(*plan.Plan) {}, ""},
		{func(p *plan.Plan) { p.Version = 0 }, ""},
		{func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 2, Zero: 1, Gather: "step"} }, ""},
		{func(p *plan.Plan) { p.Microbatches = 0 }, "microbatches is 0"},
		{func(p *plan.Plan) { p.Batch = -2 }, "batch is -2"},
		{func(p *plan.Plan) { p.Seq = 1 << 40 }, "seq is"},
		{func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 2, Zero: 9, Gather: "x"} }, "plan fsdp"},
		{func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 2} }, "fsdp.zero is 0"},
		{func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 2, Zero: 2, Gather: "layer"} }, ""},
		{func(p *plan.Plan) { p.FSDP = plan.FSDP{Size: 2, Zero: 2, Gather: "x"} }, "fsdp.gather"},
		{func(p *plan.Plan) { p.FSDP.Size = -2 }, "fsdp is -2"},
		{func(p *plan.Plan) { p.CP = plan.CP{Size: 2, Kind: "x"} }, "cp.kind"},
		{func(p *plan.Plan) { p.DP = -2 }, "dp is -2"},
		{func(p *plan.Plan) { p.DP, p.FSDP.Size, p.TP.Size = 1<<24, 1<<24, 1<<24 }, "more than"},
		{func(p *plan.Plan) { p.PP = plan.PP{Size: 2, Schedule: "x"} }, "pp.schedule"},
		{func(p *plan.Plan) { p.Precision = "zzz" }, "precision"},
		{func(p *plan.Plan) { p.Recompute = []ir.Tag{"x"} }, "recompute"},
		{func(p *plan.Plan) { p.Offload = []string{"x"} }, "offload"},
		{func(p *plan.Plan) { p.Order = []string{"dp", "dp"} }, "twice"},
		{func(p *plan.Plan) { p.Types.Grads = dtype.S32 }, "types.grads"},
		{func(p *plan.Plan) { p.Types = plan.Types{} }, "types"},
	} {
		p := plan.Default()
		p.Model, p.Cluster, p.Batch, p.Seq, p.FSDP.Size = "llama3.1-8b", "2xb200", 4, 8, 2
		row.change(p)
		err, text := p.Check(preset.Config), ""
		if err != nil {
			text = diag.From(err).Format()
		}
		if (err == nil) != (row.says == "") || !strings.Contains(text, row.says) {
			t.Errorf("%q: %s of %s", row.says, text, p)
		}
	}
}

// A product of six sizes does not wrap.
func TestDevicesDoNotWrap(t *testing.T) {
	p := plan.Default()
	p.DP, p.FSDP.Size, p.TP.Size = 1<<24, 1<<24, 1<<24 // 2^72 was 0
	if n := p.Devices(); n != math.MaxInt64 {
		t.Errorf("%d devices", n)
	}
	p = plan.Default()
	p.PP = plan.PP{Size: 8, Virtual: 1 << 24, Schedule: "interleaved"}
	if n := len(p.Stages(32)); n != 32 { // it made a list of 2^27
		t.Errorf("%d stages", n)
	}
}

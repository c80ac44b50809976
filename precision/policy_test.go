package precision_test

import (
	"errors"
	"fmt"
	"maps"
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
	"github.com/deepwell/deepwell/model"
	"github.com/deepwell/deepwell/precision"
)

func preset(t testing.TB, name string) *model.Config {
	t.Helper()
	p, err := model.Find(name)
	if err != nil {
		t.Fatal(err)
	}
	return p.Config
}

func policy(t testing.TB, c *model.Config, word string) *precision.Policy {
	t.Helper()
	p, err := precision.Default(c, word)
	if err != nil {
		t.Fatal(err)
	}
	return p
}

// The default policies of three models are committed, as a person would get them.
func TestGolden(t *testing.T) {
	small := *preset(t, "llama3.1-8b")
	small.Hidden, small.Heads, small.KVHeads, small.HeadDim, small.MLP = 192, 8, 2, 24, 516
	small.Layers = 4
	for _, row := range []struct {
		file, word string
		c          *model.Config
	}{
		{"8b-bf16.json", "bf16", preset(t, "llama3.1-8b")},
		{"8b-mxfp8.json", "mxfp8", preset(t, "llama3.1-8b")},
		{"8b-nvfp4.json", "nvfp4", preset(t, "llama3.1-8b")},
		{"deepseek-v3-nvfp4.json", "nvfp4", preset(t, "deepseek-v3")},
		{"uneven-mxfp8.json", "mxfp8", &small},
		{"uneven-nvfp4.json", "nvfp4", &small},
	} {
		p := policy(t, row.c, row.word)
		path := filepath.Join("testdata", row.file)
		want := golden.Compare(t, path, []byte(p.String()))
		q, err := precision.Parse(want, path)
		if err != nil || q.String() != p.String() || q.Check(row.c) != nil {
			t.Errorf("%s reads back as %v: %v, %v", path, q, err, q.Check(row.c))
		}
	}
}

// What the recipes say, product by product.
func TestDefault(t *testing.T) {
	llama := preset(t, "llama3.1-8b") // 32 layers: the last 5 are 15 %
	for _, row := range []struct {
		word   string
		layer  int
		linear string
		want   dtype.Format
	}{
		{"bf16", 0, "block.q", dtype.FormatBF16},
		{"mxfp8", 0, "block.q", dtype.MXFP8},
		{"mxfp8", 31, "block.down.31", dtype.MXFP8},
		{"mxfp8", -1, "head", dtype.FormatBF16},
		{"mxfp8", 3, "block.norm1", dtype.FormatBF16},
		{"mxfp8", -1, "embed", dtype.FormatBF16},
		{"nvfp4", 0, "gate", dtype.NVFP4},
		{"nvfp4", 26, "block.o", dtype.NVFP4},
		{"nvfp4", 27, "block.o", dtype.FormatBF16},
		{"nvfp4", 31, "block.up", dtype.FormatBF16},
		{"nvfp4", -1, "head", dtype.FormatBF16},
		{"nvfp4", 32, "block.q", dtype.FormatBF16}, // no layer of the model
	} {
		p := policy(t, llama, row.word)
		for _, product := range []string{precision.Fprop, precision.Dgrad, precision.Wgrad} {
			if got := p.Of(row.layer, row.linear, product); got != row.want {
				t.Errorf("%s: %s of %s in layer %d is in %s, not %s", row.word, product, row.linear,
					row.layer, got, row.want)
			}
		}
		// Everything that is said about a layer says why.
		if row.layer >= 0 && row.layer < 32 && p.Why(row.layer, "q", precision.Fprop) == "" {
			t.Errorf("%s: no reason for layer %d", row.word, row.layer)
		}
	}
	if n := len(policy(t, llama, "nvfp4").Segments()); n != 2 {
		t.Errorf("%d segments", n)
	}
	if policy(t, llama, "bf16").Quantizes() || !policy(t, llama, "nvfp4").Quantizes() {
		t.Error("bf16 quantizes, or nvfp4 does not")
	}
	_, err := precision.Default(llama, "mxfp88")
	if e, ok := errors.AsType[*diag.Error](err); !ok || e.Code != diag.PolicyValue || !strings.Contains(e.Format(), `"mxfp8"`) {
		t.Error(err)
	}
}

// Every preset that has sizes has a policy in every precision that fits it; 15 % is rounded up; and
// layers with windows, which are numbered within stacks of their own, are not mixed up.
func TestDefaultOfEveryModel(t *testing.T) {
	for _, pre := range model.Presets() {
		c := pre.Config
		if c == nil {
			continue
		}
		for _, word := range []string{"bf16", "mxfp8", "nvfp4"} {
			p, err := precision.Default(c, word)
			if err != nil {
				t.Errorf("%s in %s: %v", pre.Name, word, err)
				continue
			}
			sum := 0.0
			share := p.Share(c)
			for _, f := range slices.Sorted(maps.Keys(share)) {
				sum += share[f]
			}
			if math.Abs(sum-1) > 1e-9 {
				t.Errorf("%s in %s: shares %v", pre.Name, word, share)
			}
			if word == "nvfp4" {
				kept := int(math.Ceil(0.15 * float64(c.Layers)))
				if got := p.Of(int(c.Layers)-kept, "down", precision.Wgrad); got != dtype.FormatBF16 {
					t.Errorf("%s keeps fewer than %d layers", pre.Name, kept)
				}
			}
		}
	}
}

// The shares agree with the model's own FLOP counts.
func TestShare(t *testing.T) {
	for _, name := range []string{"llama3.1-8b", "gemma3-1b", "gpt2", "deepseek-v3", "mixtral-8x7b"} {
		c := preset(t, name)
		head := 2 * float64(c.Vocab) * float64(c.Hidden) / c.Forward(8).Linear
		router := 0.0
		if m := c.MoE; m != nil {
			router = 2 * float64((c.Layers-m.Dense)*c.Hidden*m.Experts) / c.Forward(8).Linear
		}
		got := policy(t, c, "mxfp8").Share(c)[dtype.FormatBF16]
		if math.Abs(got-head-router) > 1e-9 {
			t.Errorf("%s: %g of the work is in bf16, not %g", name, got, head+router)
		}
	}
	c := preset(t, "llama3.1-8b")
	p := policy(t, c, "mxfp8")
	fprop := p.FinalBF16().Share(c)[dtype.MXFP8] / p.Share(c)[dtype.MXFP8]
	if math.Abs(fprop-2.0/3) > 1e-9 {
		t.Errorf("without the forward products %g of the work stays", fprop)
	}
	if once := p.FinalBF16(); once.FinalBF16() != once {
		t.Error("what is repaired is repaired again")
	}
}

func TestCheck(t *testing.T) {
	c := preset(t, "llama3.1-8b")
	rule := precision.Rule{Linears: []string{"mlp"}, To: 32, Format: dtype.MXFP8, Why: "A test."}
	for _, row := range []struct {
		change func(p *precision.Policy, r *precision.Rule)
		says   string
	}{
		{func(*precision.Policy, *precision.Rule) {}, ""},
		{func(p *precision.Policy, _ *precision.Rule) { p.Layers = 31 }, "the model has 32"},
		{func(_ *precision.Policy, r *precision.Rule) { r.Linears = []string{"gat"} }, `did you mean "gate"?`},
		{func(_ *precision.Policy, r *precision.Rule) { r.Linears = []string{"attention_output"} }, "it has attn"},
		{func(_ *precision.Policy, r *precision.Rule) { r.Linears = []string{"experts"} }, "no linear layer or part"},
		{func(_ *precision.Policy, r *precision.Rule) { r.Linears = []string{"head"} }, "head cannot be in mxfp8"},
		{func(_ *precision.Policy, r *precision.Rule) { r.To = 33 }, "0-31"},
		{func(_ *precision.Policy, r *precision.Rule) { r.From = 32 }, "0-31"},
	} {
		r := rule
		p := &precision.Policy{Layers: 32}
		row.change(p, &r)
		p.Rules = append(p.Rules, r)
		text := ""
		if e, ok := errors.AsType[*diag.Error](p.Check(c)); ok {
			text = e.Format()
		}
		if row.says == "" && text != "" || !strings.Contains(text, row.says) {
			t.Errorf("%s does not say %q", text, row.says)
		}
	}
	odd := *c
	odd.MLP = 14335
	p := &precision.Policy{Layers: 32, Rules: []precision.Rule{rule}}
	if e, ok := errors.AsType[*diag.Error](p.Check(&odd)); !ok || e.Code != diag.PolicyMisfit || !strings.Contains(e.What, "blocks of 32") {
		t.Error(p.Check(&odd))
	}
}

func TestRefusedText(t *testing.T) {
	rule := func(s string) string { return `{"version": 1, "layers": 4, "rules": [` + s + `]}` }
	for _, row := range []struct {
		text string
		code diag.Code
		says string
	}{
		{`{`, diag.PolicyText, "not JSON"},
		{rule("") + "{}", diag.PolicyText, "follows"},
		{rule("") + " x", diag.PolicyText, "follows"},
		{`[]`, diag.PolicyValue, "an object"},
		{`{"layers": 4, "rules": []}`, diag.PolicyKey, `"version" is missing`},
		{`{"version": 9, "layers": 4, "rules": []}`, diag.PolicyVersion, "this binary reads 1"},
		{`{"version": 1, "layer": 4, "rules": []}`, diag.PolicyKey, `did you mean "layers"?`},
		{`{"version": 1, "layers": 0, "rules": []}`, diag.PolicyValue, "from 1"},
		{`{"version": 1, "layers": 4, "layers": 4, "rules": []}`, diag.PolicyKey, "twice"},
		{`{"version": 1, "layers": 4, "rules": {}}`, diag.PolicyValue, "a list of rules"},
		{rule(`{"linears": ["q"], "layers": "all", "format": "bf16"}`), diag.PolicyKey, `"rules.1.why" is missing`},
		{rule(`{"linears": ["q"], "layers": "all", "formt": "bf16"}`), diag.PolicyKey, `did you mean "format"?`},
		{rule(`{"linears": ["q"], "layers": "all", "format": "mxfp9"}`), diag.PolicyValue, `did you mean "mxfp8"?`},
		{rule(`{"linears": ["q", "q"]}`), diag.PolicyValue, "twice"},
		{rule(`{"linears": []}`), diag.PolicyValue, "names nothing"},
		{rule(`{"linears": "q"}`), diag.PolicyValue, "a list of linear layers"},
		{rule(`{"products": ["forward"]}`), diag.PolicyValue, "fprop, dgrad, wgrad"},
		{rule(`{"layers": "3-1"}`), diag.PolicyValue, `"0-27"`},
		{rule(`{"layers": "03"}`), diag.PolicyValue, "not layers"},
		{rule(`{"layers": 3}`), diag.PolicyValue, "a text"},
		{rule(`{"fallen": 1}`), diag.PolicyValue, "true or false"},
		{rule(`{"linears": ["q"], "layers": "4", "format": "bf16", "why": "x"}`), diag.PolicyValue, "0-3"},
		{rule(`{"linears": ["q"], "layers": "3", "format": "bf16", "why": " "}`), diag.PolicyValue, "no reason"},
	} {
		_, err := precision.Parse([]byte(row.text), "policy.json")
		e, ok := errors.AsType[*diag.Error](err)
		if !ok || e.Code != row.code || !strings.Contains(e.Format(), row.says) ||
			!strings.HasPrefix(e.Where, "policy.json:1") {
			t.Errorf("%s: %v (%+v)", row.text, err, e)
		}
	}
}

var words = []string{"attn", "mlp", "q", "k", "v", "o", "gate", "up", "down"}

// visible draws characters that a file may have: control characters are refused.
var visible = rapid.RuneFrom([]rune("\t\n"), unicode.L, unicode.N, unicode.P, unicode.S, unicode.Zs)

// draw makes some policy of a model with some layers.
func draw(t *rapid.T) *precision.Policy {
	p := &precision.Policy{Layers: rapid.IntRange(1, 9).Draw(t, "layers"),
		Payload: rapid.SampledFrom([]dtype.Format{"", dtype.FormatBF16}).Draw(t, "payload")}
	for range rapid.IntRange(0, 6).Draw(t, "rules") {
		r := precision.Rule{
			Linears: rapid.SliceOfNDistinct(rapid.SampledFrom(words), 1, 3, rapid.ID).Draw(t, "linears"),
			From:    rapid.IntRange(0, p.Layers-1).Draw(t, "from"),
			GEMMs:   rapid.SliceOfNDistinct(rapid.SampledFrom([]string{"fprop", "dgrad", "wgrad"}), 0, 1, rapid.ID).Draw(t, "products"),
			Format:  rapid.SampledFrom([]dtype.Format{dtype.FormatBF16, dtype.MXFP8, dtype.NVFP4}).Draw(t, "format"),
			Fallen:  rapid.Bool().Draw(t, "fallen"),
			Why:     "Because " + rapid.StringOf(visible).Draw(t, "why"),
		}
		r.To = rapid.IntRange(r.From+1, p.Layers).Draw(t, "to")
		p.Rules = append(p.Rules, r)
	}
	return p
}

// table spells a policy out.
func table(p *precision.Policy) (list []string) {
	for layer := range p.Layers {
		for _, linear := range words[2:] {
			for _, product := range []string{"fprop", "dgrad", "wgrad"} {
				list = append(list, string(p.Of(layer, linear, product)))
			}
		}
	}
	return list
}

func TestPrintsAndParsesItself(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := draw(t)
		q, err := precision.Parse([]byte(p.String()), "policy.json")
		if err != nil {
			t.Fatalf("%v\n%s", err, p)
		}
		if q.String() != p.String() || !slices.Equal(table(p), table(q)) {
			t.Fatalf("%s became %s", p, q)
		}
	})
}

// Segments cover all layers in order, and are alike within. Neighbours may differ only in linear
// layers that other models have.
func TestSegments(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := draw(t)
		all, each := table(p), 7*3
		row := func(layer int) []string { return all[layer*each : (layer+1)*each] }
		next := 0
		for _, s := range p.Segments() {
			if s.From != next || s.To <= s.From {
				t.Fatalf("segments %v", p.Segments())
			}
			for layer := s.From; layer < s.To; layer++ {
				if !slices.Equal(row(layer), row(s.From)) {
					t.Fatalf("%d and %d are not alike", s.From, layer)
				}
			}
			next = s.To
		}
		if next != p.Layers {
			t.Fatalf("segments end at %d", next)
		}
	})
}

// A fall changes one product and nothing else, the policy it came from is not touched, and a return
// undoes it, in any order of several.
func TestFallAndReturn(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		p := draw(t)
		for i := range p.Rules {
			p.Rules[i].Fallen = false
		}
		before, text := table(p), p.String()
		type place struct {
			layer           int
			linear, product string
		}
		places := rapid.SliceOfNDistinct(rapid.Custom(func(t *rapid.T) place {
			return place{rapid.IntRange(0, p.Layers-1).Draw(t, "layer"),
				rapid.SampledFrom(words[2:]).Draw(t, "linear"),
				rapid.SampledFrom([]string{"fprop", "dgrad", "wgrad"}).Draw(t, "product")}
		}), 1, 4, rapid.ID).Draw(t, "places")
		q := p
		for _, at := range places {
			old := q
			q = q.Fall(at.layer, "block."+at.linear, at.product, dtype.FormatBF16, "A test.")
			if q.Of(at.layer, at.linear, at.product) != dtype.FormatBF16 {
				t.Fatal("it did not fall")
			}
			changed := 0
			for i, f := range table(q) {
				if f != table(old)[i] {
					changed++
				}
			}
			if changed > 1 {
				t.Fatalf("%d products changed", changed)
			}
		}
		for _, at := range rapid.Permutation(places).Draw(t, "order") {
			var ok bool
			if q, ok = q.Return(at.layer, "block."+at.linear, at.product); !ok {
				t.Fatal("it did not return")
			}
		}
		if _, ok := q.Return(0, "q", "fprop"); ok || !slices.Equal(table(q), before) || p.String() != text {
			t.Fatalf("%s became %s", text, q)
		}
	})
}

func FuzzParse(f *testing.F) {
	files, _ := filepath.Glob("testdata/*.json")
	for _, path := range files {
		text, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text []byte) {
		p, err := precision.Parse(text, "policy.json")
		if err != nil {
			return
		}
		q, err := precision.Parse([]byte(p.String()), "again.json")
		if err != nil || q.String() != p.String() {
			t.Errorf("%s became %v: %v", p, q, err)
		}
	})
}

func ExamplePolicy_Fall() {
	preset, err := model.Find("llama3.1-8b")
	if err != nil {
		fmt.Println(err)
		return
	}
	p, err := precision.Default(preset.Config, "nvfp4")
	if err != nil {
		fmt.Println(err)
		return
	}
	p = p.Fall(2, "block.down", precision.Dgrad, dtype.MXFP8, "Half of its gradient became zero.")
	for _, s := range p.Segments() {
		fmt.Println(s, p.Of(s.From, "block.down", precision.Dgrad))
	}
	// Output:
	// {0 2} nvfp4
	// {2 3} mxfp8
	// {3 27} nvfp4
	// {27 32} bf16
}

// A name and a file stand for policies; a policy's name is its format with the fewest bits.
func TestLoad(t *testing.T) {
	c, dir := preset(t, "llama3.1-8b"), t.TempDir()
	file := func(name, text string) string {
		path := filepath.Join(dir, name)
		if err := os.WriteFile(path, []byte(text), 0o666); err != nil {
			t.Fatal(err)
		}
		return path
	}
	usual := policy(t, c, "nvfp4")
	for _, row := range []struct {
		name string
		want dtype.Format
	}{
		{"bf16", dtype.FormatBF16}, {"mxfp8", dtype.MXFP8}, {"nvfp4", dtype.NVFP4},
		{file("usual.json", usual.String()), dtype.NVFP4},
		{file("hidden.json", usual.FinalBF16().Fall(0, "q", precision.Dgrad, dtype.MXFP8, "A test.").String()),
			dtype.NVFP4},
		{file("shadowed.json", `{"version": 1, "layers": 32, "rules": [
{"linears": ["attn", "mlp"], "layers": "all", "format": "nvfp4", "why": "First."},
{"linears": ["attn", "mlp"], "layers": "all", "format": "mxfp8", "why": "Then."}]}`), dtype.MXFP8},
	} {
		p, err := precision.Load(c, row.name)
		if err != nil {
			t.Error(err)
		} else if got := p.Narrowest(); got != row.want {
			t.Errorf("%s is %s, want %s", row.name, got, row.want)
		}
	}
	for _, row := range []struct{ name, says string }{
		{filepath.Join(dir, "none.json"), "cannot read the policy"},
		{file("other.json", policy(t, preset(t, "llama3.1-70b"), "nvfp4").String()), "other.json"},
		{"nvfp5", `did you mean "nvfp4"`},
	} {
		if _, err := precision.Load(c, row.name); err == nil || !strings.Contains(err.Error(), row.says) {
			t.Errorf("%s: %v, want %q", row.name, err, row.says)
		}
	}
}

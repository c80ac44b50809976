package replay

import (
	"errors"
	"maps"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/slowtest"
)

// refusedPrograms are programs that replay must not run: what it does not know, and what contradicts
// itself.
func refusedPrograms() map[string]struct {
	code  []byte
	is    diag.Code
	names string // what the error names
} {
	type row = struct {
		code  []byte
		is    diag.Code
		names string
	}
	s := arr(typeF32, []int64{4, 4})
	unary := func(opcode string, from, to *shape, attrs msg) []byte {
		b := newBuilder("m")
		return b.returns(b.op(opcode, to, attrs, b.param(0, from)))
	}
	call := func(target, config string, operands int, result *shape) []byte {
		b := newBuilder("m")
		var list []int64
		for i := range operands {
			list = append(list, b.param(int64(i), s))
		}
		return b.returns(b.call(target, config, result, list...))
	}
	gemm := gemmText(1, 0, "DEFAULT", false, 16, 16)
	fmha := attentionCase{batch: 4, seq: 4, keys: 4, heads: 4, kv: 4, head: 4, causal: true}.config(false)
	return map[string]row{
		"opcode":     {unary("fft", s, s, nil), diag.ReplayOpcode, "fft"},
		"field":      {unary("copy", s, s, msg(nil).Int(95, 1)), diag.ProgramRead, "95"},
		"type":       {unary("copy", arr(36, []int64{4}), arr(36, []int64{4}), nil), diag.ReplayLayout, "type36"},
		"codes":      {unary("bitcast", arr(typeE2M1, []int64{4}), arr(typeU8, []int64{2}), nil), diag.ReplayLayout, "f4e2m1fn"},
		"to codes":   {unary("convert", s, arr(typeE8M0, []int64{4, 4}), nil), diag.ReplayOpcode, "f8e8m0fnu"},
		"sum codes":  {unary("negate", arr(typeE8M0, []int64{4}), arr(typeE8M0, []int64{4}), nil), diag.ReplayOpcode, "negate of f8e8m0fnu"},
		"bitcast":    {unary("bitcast", s, arr(typeF32, []int64{5}), nil), diag.ReplayLayout, "bitcast"},
		"random":     {unary("rng-bit-generator", s, s, nil), diag.ReplayOpcode, "default algorithm"},
		"order":      {unary("copy-done", s, s, nil), diag.ProgramRead, "did not start"},
		"collective": {unary("all-gather", s, s, msg(nil).Packed(14, 0).Bytes(93, nil)), diag.ReplayGroups, "axes of a mesh"},
		"iota": {unary("all-gather", s, s, msg(nil).Packed(14, 0).Bytes(92, msg(nil).Int(1, 2).Int(2, 3).Packed(3, 2, 2))),
			diag.ReplayGroups, "iota"},
		"dimension": {unary("all-gather", s, s, msg(nil).Packed(14, 2)), diag.ProgramRead, "dimension 2"},

		"call":      {call("__cublas$lt$matmul$f8", gemm, 2, s), diag.ReplayCall, "__cublas$lt$matmul$f8"},
		"buffer":    {call("CreateBuffer", "", 0, s), diag.ReplayCall, "CreateBuffer"},
		"config":    {call("__cublas$gemm", "", 2, s), diag.ReplayCall, "configuration"},
		"new field": {call("__cublas$gemm", strings.Replace(gemm, `"alpha_imag"`, `"gamma":1,"alpha_imag"`, 1), 2, s), diag.ReplayCall, "gamma"},
		"epilogue":  {call("__cublas$gemm", strings.Replace(gemm, "DEFAULT\",\"lhs", "DGELU\",\"lhs", 1), 2, s), diag.ReplayCall, "DGELU"},
		"operands":  {call("__cublas$gemm", gemm, 3, s), diag.ReplayCall, "3 operands"},
		"result":    {call("__cublas$gemm", gemm, 2, arr(typeF32, []int64{4, 5})), diag.ReplayCall, "[4 5]"},
		"results":   {call("__cublas$gemm", gemm, 2, tup(s, s)), diag.ReplayCall, "1 results"},
		"strides":   {call("__cublas$gemm", gemmText(1, 0, "DEFAULT", false, 16, 8), 2, s), diag.ReplayConfig, "stride of 8"},
		"scales":    {call("__cudnn$blockScaledDot", "", 4, tup(s, s)), diag.ReplayCall, "scales of f32"},
		"mask":      {call("__cudnn$fmhaSoftmax", strings.Replace(fmha, "CAUSAL", "ALIBI", 1), 3, s), diag.ReplayCall, "ALIBI"},
		"no length": {call("__cudnn$fmhaSoftmax", strings.Replace(fmha, "CAUSAL", "PADDING_CAUSAL", 1), 3, s), diag.ReplayCall, "knows 5"},
		"dropout":   {call("__cudnn$fmhaSoftmax", strings.Replace(fmha, `"seed"`, `"dropout_rate":0.1,"seed"`, 1), 3, s), diag.ReplayCall, "dropout"},
		"packed":    {call("__cudnn$fmhaSoftmax", strings.Replace(fmha, `batch":1`, `batch":3`, 1), 3, s), diag.ReplayCall, "3 segments"},
		"lengths":   {call("__cudnn$fmhaSoftmax", fmha, 5, s), diag.ReplayCall, "sequence lengths"},
		"window":    {call("__cudnn$fmhaSoftmax", strings.Replace(strings.Replace(fmha, "CAUSAL", "NO_MASK", 1), `length":0`, `length":2`, 1), 3, s), diag.ReplayCall, "window of 2"},

		"trips":     {loopProgram(loopConfigText(5, 0, 1), sliceConfigText(36, -12)), diag.ReplayConfig, "runs 5 times"},
		"variable":  {loopProgram(loopConfigText(4, 0, 2), sliceConfigText(36, -12)), diag.ReplayConfig, "by 2"},
		"offset":    {loopProgram(loopConfigText(4, 0, 1), sliceConfigText(24, -12)), diag.ReplayConfig, "byte 36"},
		"stride":    {loopProgram(loopConfigText(4, 0, 1), sliceConfigText(36, -8)), diag.ReplayConfig, "byte 24"},
		"too long":  {countProgram(maxTrips + 1), diag.ReplayConfig, "runs more than 4095 times"},
		"no config": {loopProgram("{", sliceConfigText(36, -12)), diag.ReplayConfig, "not understood"},
	}
}

// countProgram counts to n.
func countProgram(n int64) []byte {
	b := newBuilder("count")
	count := arr(typeS32, nil)
	body := b.computation("body")
	bodyID := body.done(body.op("add", count, nil, body.param(0, count), body.scalar(1)))
	c := b.computation("condition")
	conditionID := c.done(c.op("compare", arr(typePred, nil), msg(nil).Text(63, "LT").
		Text(102, "TOTAL"), c.param(0, count), c.scalar(n)))
	return b.returns(b.op("while", count, msg(nil).Packed(38, bodyID, conditionID), b.scalar(0)))
}

// What replay does not know is refused by name, with a code of its own.
func TestRefusals(t *testing.T) {
	rows := refusedPrograms()
	for _, name := range slices.Sorted(maps.Keys(rows)) {
		row := rows[name]
		m, err := Rewrite("hlo", row.code, Options{})
		if m != nil || !errors.Is(err, row.is) || !strings.Contains(err.Error(), row.names) {
			t.Errorf("%s: %v, want %s and %q", name, err, row.is, row.names)
		}
	}
	for _, format := range []string{"mlir", "hlo_with_config"} {
		if _, err := Rewrite(format, []byte{1, 2, 3}, Options{}); !errors.Is(err, diag.ProgramRead) {
			t.Errorf("%s: %v", format, err)
		}
	}
}

// A computation that calls itself is refused, not followed.
func TestRecursionIsRefused(t *testing.T) {
	b := newBuilder("m")
	s := arr(typeF32, nil)
	b.done(b.op("call", s, msg(nil).Packed(38, 1), b.param(0, s)))
	code := msg(nil).Int(6, 1).Bytes(3, (*b.all)[0])
	if _, err := Rewrite("hlo", code, Options{}); !errors.Is(err, diag.ProgramRead) {
		t.Error(err)
	}
}

// Every call has conventions, every convention is a call's, and a module names those it trusts.
func TestConventions(t *testing.T) {
	seen := map[string]bool{}
	targets := map[string][]string{}
	for _, c := range Conventions() {
		if seen[c.Name] || !strings.HasSuffix(c.Says, ".") || len(c.Targets) == 0 {
			t.Errorf("%+v stands twice, is no sentence or belongs to no call", c)
		}
		seen[c.Name] = true
		for _, target := range c.Targets {
			targets[target] = append(targets[target], c.Name)
		}
	}
	if got, want := slices.Sorted(maps.Keys(targets)), slices.Sorted(maps.Keys(calls())); !slices.Equal(got, want) {
		t.Errorf("conventions of %v, rules of %v", got, want)
	}
	m, err := Rewrite("hlo", gemmExamples()[0].code, Options{})
	if err != nil || !slices.Equal(m.Conventions, []string{"gemm", "workspace"}) ||
		m.Rules["__cublas$lt$matmul"] != 1 || m.Rules["parameter"] != 2 {
		t.Errorf("%+v, %v", m, err)
	}
}

// A stride that is wrong by a byte is refused, each one of a step whose loops have two iterations.
func TestStridesOfStepAreChecked(t *testing.T) {
	slowtest.Only(t)
	p := gradient(t, "bf16", "fsdp8 of 3 layers")
	format, code, err := runner(t).Compile(t.Context(), p.GPU, p.Cluster)
	if err != nil {
		t.Fatal(err)
	}
	// The last digit is changed, so that the messages around the text keep their lengths.
	strides := regexp.MustCompile(`"byte_stride":"-?[1-9][0-9]*"`).FindAllIndex(code, -1)
	for _, at := range strides {
		wrong := slices.Clone(code)
		wrong[at[1]-2] ^= 1
		_, err := Rewrite(format, wrong, Options{Wide: true})
		if !errors.Is(err, diag.ReplayConfig) {
			t.Errorf("%s instead of %s: %v", wrong[at[0]:at[1]], code[at[0]:at[1]], err)
		}
	}
	if len(strides) < 10 {
		t.Errorf("the program has %d strides", len(strides))
	}
}

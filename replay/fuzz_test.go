package replay

import (
	"errors"
	"os"
	"path/filepath"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// realPrograms are small optimized programs for B200, which package hlo is tested with.
func realPrograms(tb testing.TB) map[string][]byte {
	names, err := filepath.Glob(filepath.Join("..", "hlo", "testdata", "b200_*.hlo"))
	if err != nil || len(names) == 0 {
		tb.Fatalf("no programs: %v", err)
	}
	all := map[string][]byte{}
	for _, name := range names {
		if all[filepath.Base(name)], err = os.ReadFile(name); err != nil {
			tb.Fatal(err)
		}
	}
	return all
}

// Programs of an earlier compiler are rewritten too, but for one that has parameters of half bytes.
func TestRealPrograms(t *testing.T) {
	for name, code := range realPrograms(t) {
		for _, wide := range []bool{false, true} {
			_, err := Rewrite("hlo_with_config", code, Options{Wide: wide})
			if name == "b200_nvfp4.hlo" && errors.Is(err, diag.ReplayLayout) {
				continue
			}
			if err != nil {
				t.Errorf("%s: %v", name, err)
			}
		}
	}
}

// FuzzRewrite feeds arbitrary bytes. Run it with -fuzzminimizetime=1x.
func FuzzRewrite(f *testing.F) {
	for _, code := range realPrograms(f) {
		f.Add(true, code)
	}
	for _, x := range examples() {
		f.Add(false, x.code)
	}
	for _, row := range refusedPrograms() {
		f.Add(false, row.code)
	}
	f.Fuzz(func(t *testing.T, config bool, code []byte) {
		format := "hlo"
		if config {
			format = "hlo_with_config"
		}
		for _, o := range []Options{{}, {Wide: true, Fill: RandomBits}} {
			m, err := Rewrite(format, code, o)
			if (m == nil) == (err == nil) {
				t.Error("a module comes with an error, or neither comes")
			}
			if _, ok := errors.AsType[*diag.Error](err); err != nil && !ok {
				t.Errorf("an error without a code: %v", err)
			}
			if m == nil {
				continue
			}
			// What was written can be read again, and has only instructions that replay knows.
			if _, err := decodeProgram("hlo", m.Code); err != nil {
				t.Errorf("the rewritten program: %v", err)
			}
		}
	})
}

package diag

import (
	"encoding/json"
	"errors"
	"fmt"
	"go/format"
	"io/fs"
	"os"
	"regexp"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/golden"
)

func TestCodesAreUniqueAndExplained(t *testing.T) {
	seen := map[Code]bool{}
	for _, r := range catalogue {
		switch {
		case seen[r.code]:
			t.Errorf("%s stands twice", r.code)
		case r.class < Failed || r.class > Stalled:
			t.Errorf("%s has class %d", r.code, r.class)
		case r.meaning == "" || r.example == "":
			t.Errorf("%s lacks a meaning or an example", r.code)
		}
		seen[r.code] = true
	}
}

// TestCodesHaveRows holds the constants and the lines of codes.tsv to each other.
func TestCodesHaveRows(t *testing.T) {
	text, err := os.ReadFile("codes.go")
	if err != nil {
		t.Fatal(err)
	}
	var named, listed []string
	for _, m := range regexp.MustCompile(`Code = "(DW[0-9]+)"`).FindAllStringSubmatch(string(text), -1) {
		named = append(named, m[1])
	}
	for _, r := range catalogue {
		listed = append(listed, string(r.code))
	}
	slices.Sort(named)
	slices.Sort(listed)
	if !slices.Equal(named, listed) {
		t.Errorf("codes.go names %v, codes.tsv lists %v", named, listed)
	}
}

var codeLine = regexp.MustCompile(`^\t(\w+) +Code = "(DW[0-9]+)"$`)

// TestCodesAreExplained holds the comment of each constant to its meaning in codes.tsv.
func TestCodesAreExplained(t *testing.T) {
	text, err := os.ReadFile("codes.go")
	if err != nil {
		t.Fatal(err)
	}
	var b strings.Builder
	inside := false
	for line := range strings.Lines(string(text)) {
		switch m := codeLine.FindStringSubmatch(strings.TrimSuffix(line, "\n")); {
		case strings.HasPrefix(line, "const ("):
			inside = true
		case strings.HasPrefix(line, ")"):
			inside = false
		case inside && strings.HasPrefix(line, "\t//"):
			continue // is written again
		case inside && m != nil:
			at := slices.IndexFunc(catalogue, func(r row) bool { return string(r.code) == m[2] })
			if at < 0 {
				t.Fatalf("%s is not in codes.tsv", m[2])
			}
			comment := "\t//"
			for word := range strings.FieldsSeq(m[1] + ": " + catalogue[at].meaning + ".") {
				if len(comment)+1+len(word) > 96 {
					b.WriteString(comment + "\n")
					comment = "\t//"
				}
				comment += " " + word
			}
			b.WriteString(comment + "\n")
		}
		b.WriteString(line)
	}
	written, err := format.Source([]byte(b.String()))
	if err != nil {
		t.Fatal(err)
	}
	golden.Compare(t, "codes.go", written)
}

func TestErrorSaysEverything(t *testing.T) {
	e := New(EngineMissing, "engine %q is not installed", "cpu").At("~/engines").
		Wrap(fs.ErrNotExist).Try("deepwell engine install cpu")
	want := "DW2002 engine \"cpu\" is not installed\n" +
		"  where  ~/engines\n  cause  file does not exist\n  fix    deepwell engine install cpu\n"
	if got := e.Format(); got != want {
		t.Errorf("Format:\n%s\nwant:\n%s", got, want)
	}
	if !errors.Is(e, fs.ErrNotExist) || !errors.Is(fmt.Errorf("open: %w", e), EngineMissing) ||
		errors.Is(e, EngineLoad) {
		t.Error("errors.Is does not see the wrapped error or the code")
	}
	if strings.Contains(e.Error(), "\n") {
		t.Error("Error is longer than one line")
	}
	js, err := json.Marshal(e)
	if err != nil || !strings.Contains(string(js), `"exit":1`) {
		t.Errorf("json: %s %v", js, err)
	}
}

func TestFromGivesEveryErrorACode(t *testing.T) {
	if From(nil) != nil {
		t.Error("nil became an error")
	}
	if got := From(errors.New("boom")).Code; got != Internal {
		t.Errorf("code %s", got)
	}
	inner := New(OutOfMemory, "full")
	if got := From(fmt.Errorf("run: %w", inner)); got != inner || got.Class() != NoFit {
		t.Errorf("got %v", got)
	}
}

// A bare code keeps its code and its exit class.
func TestFromABareCode(t *testing.T) {
	for _, err := range []error{PlanNoFit, fmt.Errorf("planning: %w", PlanNoFit)} {
		e := From(err)
		if e.Code != PlanNoFit || e.Class() != NoFit || !errors.Is(e, PlanNoFit) || e.What == "" {
			t.Errorf("%v becomes %v, exit %d", err, e, e.Class())
		}
	}
	if From(nil) != nil {
		t.Error("no error became one")
	}
}

func TestNearest(t *testing.T) {
	names := []string{"b200", "gb200", "h100", "cuda13", "cuda13-run"}
	for typed, want := range map[string]string{
		"b2000": "b200", "cuda": "cuda13", "h10": "h100", "zzzzzzzz": "", "gb20": "gb200",
	} {
		if got := Nearest(typed, names); got != want {
			t.Errorf("Nearest(%q) = %q, want %q", typed, got, want)
		}
	}
}

func ExampleError_Format() {
	err := New(ClusterSpec, "%q is not a cluster", "b200x8").Try("--cluster 8xb200")
	fmt.Print(err.Format())
	// Output:
	// DW2402 "b200x8" is not a cluster
	//   fix    --cluster 8xb200
}

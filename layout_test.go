package deepwell

import (
	"encoding/json"
	"errors"
	"go/ast"
	"go/doc"
	"go/parser"
	"go/token"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/recipe"
)

const module = "github.com/deepwell/deepwell"

// layers is the house: a package imports only from rows above its own, or packages of its own row
// that stand before it. doc.go tells the same story in words.
var layers = [][]string{
	{"internal/lists", "internal/flat", "internal/parallel", "internal/golden", "diag", "dtype",
		"dtype/block", "schedule", "kernels/triton", "kernels/triton/run", "kernels/expr", "kernels/fused",
		"kernels/rownorm", "kernels/flash"},
	{"internal/plainfile", "internal/strictjson", "internal/wire", "internal/human", "internal/stat",
		"internal/svg", "internal/atomicfile", "internal/flock", "event", "internal/safedir",
		"safetensors", "tokenizer", "jinja", "internal/parquet", "internal/cas", "internal/environ",
		"internal/stubcuda", "internal/nvml", "internal/hlotest", "hlo",
		"internal/pjrt", "internal/slowtest", "internal/strided", "internal/malloc", "internal/tfevents",
		"internal/hostlist",
		"report", "internal/trace", "machine", "plugin", "internal/softgpu", "launch"},
	{"program", "ir", "ir/eval", "internal/irtest", "chat", "data", "link"},
	{"engine", "optim", "model", "ckpt", "recipe", "overlap", "precision/monitor"},
	{"internal/isolate", "internal/abtest", "capture/pt2", "capture/aten", "capture", "plan", "internal/plantest", "kernels", "price",
		"precision", "quantize", "internal/room"},
	{"spmd", "rewrite", "lower/stablehlo", "lower/quantized", "lower/cpu", "lower/gpu", "lower", "cost",
		"estimate/footprint", "estimate"},
	{"internal/selftest", "internal/enginetest", "internal/firstuse", "dryrun", "preflight"},
	{"pipeline", "step", "autoplan", "call"},
	{"replay", "gpucheck", "gpubench", "kernels/table"},
	{"train"},
	{"parity"},
	{"", "cmd/deepwell", "bench/dispatch", "bench/copy", "bench/aot", "bench/step", "bench/curve",
		"bench/depth", "bench/overlap", "bench/prices", "bench/mesh", "bench/moe", "bench/balance", "bench/accuracy", "bench/memory",
		"bench/live", "bench/attack", "bench/quantize", "bench/quantizeckpt", "bench/parity", "bench/monitor",
		"bench/pluginupdate", "bench/context", "bench/kernels"},
}

// place gives a package's row and its place in the row.
func place(pkg string) (row, at int, ok bool) {
	for row, names := range layers {
		if at := slices.Index(names, pkg); at >= 0 {
			return row, at, true
		}
	}
	return 0, 0, false
}

type listed struct {
	ImportPath string
	Dir        string
	Imports    []string
	GoFiles    []string
	Deps       []string
}

// list asks the go command; the tests run in the module's root.
func list(t *testing.T, args ...string) []listed {
	t.Helper()
	cmd := exec.Command("go", append([]string{"list", "-json=ImportPath,Dir,Imports,GoFiles,Deps"}, args...)...)
	cmd.Env = append(os.Environ(), "CGO_ENABLED=0") // as the product is built
	out, err := cmd.Output()
	if err != nil {
		if e, ok := errors.AsType[*exec.ExitError](err); ok {
			t.Fatalf("go list: %s", e.Stderr)
		}
		t.Fatal(err)
	}
	var all []listed
	dec := json.NewDecoder(strings.NewReader(string(out)))
	for dec.More() {
		var p listed
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		all = append(all, p)
	}
	return all
}

func short(path string) string { return strings.TrimPrefix(strings.TrimPrefix(path, module), "/") }

func TestPackagesImportDownwardsOnly(t *testing.T) {
	for _, p := range list(t, "./...") {
		name := short(p.ImportPath)
		row, at, ok := place(name)
		if !ok {
			t.Errorf("package %q has no row in the table of layers", name)
			continue
		}
		for _, path := range p.Imports {
			if path != module && !strings.HasPrefix(path, module+"/") {
				continue
			}
			toRow, toAt, ok := place(short(path))
			if !ok || toRow > row || toRow == row && toAt >= at {
				t.Errorf("%s imports %s, which is not above it", name, short(path))
			}
		}
	}
}

func TestPackagesSayWhatTheyTurnIntoWhat(t *testing.T) {
	for _, p := range list(t, "./...") {
		name := short(p.ImportPath)
		fset := token.NewFileSet()
		var files []*ast.File
		for _, f := range p.GoFiles {
			parsed, err := parser.ParseFile(fset, filepath.Join(p.Dir, f), nil, parser.ParseComments)
			if err != nil {
				t.Fatal(err)
			}
			files = append(files, parsed)
		}
		d, err := doc.NewFromFiles(fset, files, p.ImportPath)
		if err != nil {
			t.Fatal(err)
		}
		switch text := strings.Join(strings.Fields(d.Doc), " "); {
		case strings.HasPrefix(name, "cmd/") || strings.HasPrefix(name, "bench/"):
			if !strings.HasPrefix(text, "Command ") {
				t.Errorf("%s: the package comment does not begin with Command", name)
			}
		case !strings.HasPrefix(text, "Package "+d.Name+" turns "):
			t.Errorf("%s: the package comment does not begin %q", name, "Package "+d.Name+" turns")
		}
		for _, bad := range []string{"util", "utils", "common", "helpers", "types", "pkg", "misc"} {
			if d.Name == bad {
				t.Errorf("%s is a drawer, not a package", name)
			}
		}
	}
}

// grown lists what is larger than the limits below, and the decision that says why.
var grown = map[string]string{
	"exported diag":          "0010: a code is a row of the catalogue, not a part of the face",
	"exported dtype":         "0010: an element type is a row of the table",
	"exported ir":            "0010: tags, roles and the dimensions that attention names are words of a language",
	"files capture/aten":     "0010: one file for each group of operators, and one for each reading",
	"files cmd/deepwell":     "0010: one file for each command",
	"files ir":               "0010: one file for each group of operations, and one for each rewriting",
	"exported model":         "0010: parts of a model, and inputs and statistics of its graph, are words",
	"files model":            "0010: one file for each kind of layer, and one for each way to a configuration",
	"files train":            "0010: one file for each thing that a run does beside a step",
	"files rewrite":          "0010: one file for each pass",
	"exported rewrite":       "0010: an operation that a pass adds is a word",
	"files replay":           "0010: one file for each kind of rule, and one for each part of the runner",
	"exported spmd":          "0010: names by which graphs meet",
	"files ":                 "0010: one file for each verb of the pipeline",
	"exported ":              "0010: a job and a result for each verb",
	"exported schedule":      "0010: kinds of action, layouts and ops are words",
	"exported kernels":       "0010: a kernel that an operation can become is a word",
	"exported event":         "0010: a kind of event is a row of the table",
	"exported program":       "0010: roles of arguments and causes of memory are words",
	"exported internal/pjrt": "0010: the C interface has that many nouns, and one package may know them",
	"files internal/pjrt":    "0010: the C interface has that many nouns, and one package may know them",
}

const (
	maxExported = 25
	maxFiles    = 12
	maxLines    = 800
	maxColumns  = 100
)

const maxKeys = 32

// A recipe stays something that a person can read.
func TestRecipeIsShort(t *testing.T) {
	if n := len(recipe.Keys()); n > maxKeys {
		t.Errorf("run.toml has %d keys, more than %d", n, maxKeys)
	}
}

func TestSize(t *testing.T) {
	large := map[string]bool{}
	check := func(what string, n, limit int) {
		if large[what] = n > limit; large[what] && grown[what] == "" {
			t.Errorf("%s: %d, more than %d", what, n, limit)
		}
	}
	for _, p := range list(t, "./...") {
		name := short(p.ImportPath)
		check("exported "+name, len(exported(t, p)), maxExported)
		check("files "+name, len(p.GoFiles), maxFiles)
	}
	err := filepath.WalkDir(".", func(path string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() || !strings.HasSuffix(path, ".go") {
			return err
		}
		b, err := os.ReadFile(path)
		if err != nil {
			return err
		}
		lines := strings.Split(string(b), "\n")
		check("lines "+path, len(lines), maxLines)
		for i, line := range lines {
			width := len([]rune(line))
			if width > maxColumns && !strings.HasSuffix(path, "_test.go") {
				t.Errorf("%s:%d has %d columns, more than %d", path, i+1, width, maxColumns)
			}
		}
		return nil
	})
	if err != nil {
		t.Fatal(err)
	}
	for what := range grown {
		if !large[what] {
			t.Errorf("%s is within the limit, and listed as larger", what)
		}
	}
}

func exported(t *testing.T, p listed) []string {
	t.Helper()
	var names []string
	fset := token.NewFileSet()
	for _, f := range p.GoFiles {
		file, err := parser.ParseFile(fset, filepath.Join(p.Dir, f), nil, 0)
		if err != nil {
			t.Fatal(err)
		}
		for name := range file.Scope.Objects { //nolint:staticcheck // package-level names are all we need
			if ast.IsExported(name) {
				names = append(names, name)
			}
		}
	}
	return names
}

// The packages that each binary links are committed, so that a new one is seen in review.
func TestDependenciesAreListed(t *testing.T) {
	for _, binary := range []string{"cmd/deepwell"} {
		var foreign []string
		for _, dep := range list(t, "./"+binary)[0].Deps {
			host, _, _ := strings.Cut(dep, "/")
			if strings.Contains(host, ".") && !strings.HasPrefix(dep, module) {
				foreign = append(foreign, dep)
			}
		}
		slices.Sort(foreign)
		got := strings.Join(foreign, "\n") + "\n"
		path := filepath.Join(filepath.FromSlash(binary), "deps.txt")
		golden.Compare(t, path, []byte(got)) // go test . -run Dependencies -update
	}
}

// Every module that is linked or used by tests has its line in docs/dependencies.md.
func TestDependenciesAreExplained(t *testing.T) {
	text, err := os.ReadFile("docs/dependencies.md")
	if err != nil {
		t.Fatal(err)
	}
	mod, err := os.ReadFile("go.mod")
	if err != nil {
		t.Fatal(err)
	}
	for line := range strings.Lines(string(mod)) {
		fields := strings.Fields(line)
		if len(fields) >= 2 && strings.HasPrefix(fields[1], "v") && !strings.Contains(line, "// indirect") &&
			!strings.Contains(string(text), "`"+fields[0]+"`") {
			t.Errorf("docs/dependencies.md has no line for %s", fields[0])
		}
	}
}

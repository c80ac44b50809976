package deepwell

import (
	"encoding/json"
	"fmt"
	"go/importer"
	"go/token"
	"go/types"
	"io"
	"os"
	"os/exec"
	"strings"
	"testing"
)

// TestAPIHasNoInternalTypes holds the exported API of every public package to types that another
// module can name. It reads export data, which the build of the tests has left in the cache.
func TestAPIHasNoInternalTypes(t *testing.T) {
	cmd := exec.Command("go", "list", "-export", "-deps", "-json=ImportPath,Export,Name", "./...")
	out, err := cmd.Output()
	if err != nil {
		t.Fatal(err)
	}
	exports := map[string]string{}
	var public []string
	for dec := json.NewDecoder(strings.NewReader(string(out))); dec.More(); {
		var p struct{ ImportPath, Export, Name string }
		if err := dec.Decode(&p); err != nil {
			t.Fatal(err)
		}
		exports[p.ImportPath] = p.Export
		if name := short(p.ImportPath); p.Name != "main" && (p.ImportPath == module ||
			name != p.ImportPath && !strings.HasPrefix(name, "internal/")) {
			public = append(public, p.ImportPath)
		}
	}
	if len(public) < 20 {
		t.Fatalf("only %d public packages were found", len(public))
	}
	imp := importer.ForCompiler(token.NewFileSet(), "gc", func(path string) (io.ReadCloser, error) {
		return os.Open(exports[path])
	})
	for _, path := range public {
		pkg, err := imp.Import(path)
		if err != nil {
			t.Fatal(err)
		}
		for _, leak := range internalTypes(pkg) {
			t.Errorf("%s", leak)
		}
	}
}

// A test of the test: go/types prints what it walks, and the walk must reach each kind of type.
func TestInternalTypesAreFound(t *testing.T) {
	hidden := types.NewPackage(module+"/internal/x", "x")
	secret := types.NewNamed(types.NewTypeName(0, hidden, "T", nil), types.Typ[types.Int], nil)
	for _, typ := range []types.Type{
		secret, types.NewPointer(secret), types.NewSlice(secret), types.NewArray(secret, 2),
		types.NewMap(types.Typ[types.String], secret), types.NewChan(types.SendRecv, secret),
		types.NewSignatureType(nil, nil, nil,
			types.NewTuple(types.NewParam(0, nil, "", secret)), nil, false),
		types.NewStruct([]*types.Var{types.NewField(0, nil, "F", secret, false)}, nil),
		types.NewInterfaceType(nil, []types.Type{secret}),
	} {
		pkg := types.NewPackage(module+"/p", "p")
		pkg.Scope().Insert(types.NewVar(0, pkg, "V", typ))
		if got := internalTypes(pkg); len(got) != 1 {
			t.Errorf("%v: found %q", typ, got)
		}
	}
}

// internalTypes names each exported declaration of a package that carries an internal type.
func internalTypes(pkg *types.Package) []string {
	var leaks []string
	for _, name := range pkg.Scope().Names() {
		obj := pkg.Scope().Lookup(name)
		if !obj.Exported() {
			continue
		}
		w := &apiWalk{seen: map[types.Type]bool{}}
		w.object(obj)
		for _, l := range w.leaks {
			leaks = append(leaks, fmt.Sprintf("%s.%s%s", short(pkg.Path()), name, l))
		}
	}
	return leaks
}

type apiWalk struct {
	at    string
	seen  map[types.Type]bool
	leaks []string
}

func (w *apiWalk) object(obj types.Object) {
	named, ok := obj.Type().(*types.Named)
	if _, isType := obj.(*types.TypeName); !isType || !ok || named.Obj() != obj {
		w.typ(obj.Type()) // a function, variable, constant or alias
		return
	}
	w.under(".", named.Underlying())
	for m := range named.Methods() {
		w.under("."+m.Name(), m.Type(), m.Exported())
	}
}

func (w *apiWalk) under(at string, t types.Type, look ...bool) {
	if len(look) == 1 && !look[0] {
		return
	}
	before := w.at
	w.at += at
	w.typ(t)
	w.at = before
}

// typ visits the types that a declaration spells out. It does not enter the declarations of other
// named types: those are looked at where they are declared.
func (w *apiWalk) typ(t types.Type) {
	switch t := t.(type) {
	case *types.Alias:
		w.name(t.Obj())
		w.typ(t.Rhs())
	case *types.Named:
		w.name(t.Obj())
		for arg := range t.TypeArgs().Types() {
			w.typ(arg)
		}
	case interface{ Elem() types.Type }:
		if m, ok := t.(*types.Map); ok {
			w.typ(m.Key())
		}
		w.typ(t.Elem())
	case *types.Signature:
		for v := range t.Params().Variables() {
			w.typ(v.Type())
		}
		for v := range t.Results().Variables() {
			w.typ(v.Type())
		}
	case *types.Struct:
		for f := range t.Fields() {
			if f.Exported() || f.Embedded() {
				w.under(f.Name(), f.Type())
			}
		}
	case *types.Interface:
		for m := range t.ExplicitMethods() {
			w.under(m.Name(), m.Type(), m.Exported())
		}
		for e := range t.EmbeddedTypes() {
			w.typ(e)
		}
	case *types.Union:
		for term := range t.Terms() {
			w.typ(term.Type())
		}
	}
}

func (w *apiWalk) name(obj *types.TypeName) {
	if obj.Pkg() != nil && strings.Contains(obj.Pkg().Path(), "/internal/") {
		w.leaks = append(w.leaks, fmt.Sprintf("%s: %s.%s", w.at, short(obj.Pkg().Path()), obj.Name()))
	}
}

// The program outside the module compiles; .ci/run runs it.
func TestLibraryExampleCompiles(t *testing.T) {
	if testing.Short() {
		t.Skip("compiles another module")
	}
	cmd := exec.Command("go", "vet", ".")
	cmd.Dir = "examples/library"
	if out, err := cmd.CombinedOutput(); err != nil {
		t.Errorf("%v\n%s", err, out)
	}
}

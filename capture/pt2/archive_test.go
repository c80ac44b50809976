package pt2

import (
	"bytes"
	"compress/gzip"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/golden"
	"github.com/deepwell/deepwell/safetensors"
)

func must[T any](t testing.TB) func(v T, err error) T {
	return func(v T, err error) T {
		t.Helper()
		if err != nil {
			t.Fatal(err)
		}
		return v
	}
}

// unpack reads a fixture of testdata, such as llama.pt2.
func unpack(t testing.TB, name string) []byte {
	t.Helper()
	packed := must[[]byte](t)(os.ReadFile(filepath.Join("testdata", name+".gz")))
	r := must[*gzip.Reader](t)(gzip.NewReader(bytes.NewReader(packed)))
	return must[[]byte](t)(io.ReadAll(r))
}

// fixtures lists the archives of testdata.
func fixtures(t testing.TB) (names []string) {
	t.Helper()
	for _, path := range must[[]string](t)(filepath.Glob("testdata/*.pt2.gz")) {
		names = append(names, strings.TrimSuffix(filepath.Base(path), ".pt2.gz"))
	}
	return names
}

func open(t testing.TB, name string) *Archive {
	t.Helper()
	return must[*Archive](t)(Parse(name, unpack(t, name+".pt2")))
}

// Every fixture is read, and what is read of it is as committed: one line for each model here, and
// whole programs of three.
func TestFixtures(t *testing.T) {
	var table strings.Builder
	names := fixtures(t)
	if len(names) < 25 {
		t.Fatalf("only %d fixtures", len(names))
	}
	for _, name := range names {
		a := open(t, name)
		p := a.Program
		params := 0
		for _, in := range p.Inputs {
			if in.Kind == Parameter {
				params++
			}
		}
		fmt.Fprintf(&table, "%-12s torch %s schema %d.%d: %d nodes, %d parameters of %d tensors, tied %v, %s → %s\n",
			name, p.Torch, p.Schema[0], p.Schema[1], len(p.Graph.Nodes), params, len(a.Tensors()), a.Tied(),
			users(p.Inputs), users(p.Outputs))
		for _, n := range p.Graph.Nodes {
			if strings.ContainsAny(n.Source, `/\`) {
				t.Errorf("%s: %s is at %s", name, n.Target, n.Source)
			}
		}
	}
	golden.Compare(t, "testdata/fixtures.txt", []byte(table.String()))
	for _, name := range []string{"storages", "mixtral", "gpt_oss"} {
		golden.Compare(t, "testdata/"+name+".txt", []byte(printed(open(t, name).Program)))
	}
}

func users(specs []Spec) string {
	var names []string
	for _, s := range specs {
		if s.Kind == UserInput || s.Kind == UserOutput || s.Kind == ConstantInput {
			names = append(names, s.Name)
		}
	}
	return strings.Join(names, " ")
}

// printed writes a program as text.
func printed(p *Program) string {
	var b strings.Builder
	for _, s := range slices.Concat(p.Inputs, p.Outputs) {
		fmt.Fprintf(&b, "%s %q %v persistent=%v\n", s.Kind, s.Name, s.Arg, s.Persistent)
	}
	fmt.Fprintln(&b, p.Ranges)
	p.Graph.print(&b, "")
	return b.String()
}

func (g *Graph) print(b *strings.Builder, indent string) {
	fmt.Fprintf(b, "%sgraph %s: %v → %v\n", indent, g.Name, g.Inputs, g.Outputs)
	for _, n := range g.Nodes {
		path := ""
		if len(n.Modules) > 0 {
			path = n.Modules[len(n.Modules)-1].Path
		}
		var results []string
		for _, r := range n.Outputs {
			v := g.Values[string(r)]
			results = append(results, fmt.Sprintf("%s %s%v", r, v.Type, v.Dims))
		}
		fmt.Fprintf(b, "%s  %s = %s(", indent, strings.Join(results, ", "), n.Target)
		for i, a := range n.Args {
			if i > 0 {
				b.WriteString(", ")
			}
			if sub, ok := a.Value.(*Graph); ok {
				fmt.Fprintf(b, "%s=graph %s", a.Name, sub.Name)
			} else {
				fmt.Fprintf(b, "%s=%v:%T", a.Name, a.Value, a.Value)
			}
		}
		fmt.Fprintf(b, ") %s %s\n", path, n.Source)
		for _, a := range n.Args {
			if sub, ok := a.Value.(*Graph); ok {
				sub.print(b, indent+"    ")
			}
		}
	}
}

// All views of the fixture are read as torch reads them.
func TestTensors(t *testing.T) {
	a := open(t, "storages")
	want := must[*safetensors.Set](t)(safetensors.Parse("storages", unpack(t, "storages.safetensors")))
	defer want.Close()
	for _, name := range want.Names() {
		w := must[safetensors.Tensor](t)(want.Tensor(name))
		got, err := a.Tensor(name)
		if err != nil {
			t.Error(err)
			continue
		}
		data := must[[]byte](t)(got.Bytes())
		if bits := must[[]byte](t)(w.Bytes()); !got.Shape().Equal(w.Shape()) || !bytes.Equal(data, bits) {
			t.Errorf("%s: %v %v, want %v %v", name, got.Shape(), data, w.Shape(), bits)
		}
		numbers := make([]float32, got.Shape().Elements())
		if err := got.Read(numbers); err != nil {
			t.Error(err)
		}
		integers := strings.HasPrefix(name, "t_") && name != "t_bool"
		if integers && !slices.Equal(numbers, []float32{0, 1, 3, 96}) || name == "scalar" && numbers[0] != 2.5 {
			t.Errorf("%s is %v", name, numbers)
		}
		if err := got.Read(make([]float32, len(numbers)+1)); diag.From(err).Code != codeCaller {
			t.Error(err)
		}
	}
	if got := fmt.Sprint(a.Tied()); got != "[[second again]]" {
		t.Errorf("tied: %s", got)
	}
	if _, err := a.Tensor("nothing"); diag.From(err).Code != codeCaller {
		t.Error(err)
	}
}

// A program without numbers can be read, but for them; nothing seems to be tied in it.
func TestMeta(t *testing.T) {
	a := open(t, "meta")
	if tied := a.Tied(); tied != nil {
		t.Errorf("tied: %v", tied)
	}
	for _, x := range a.Tensors() {
		if err := x.Read(make([]float32, x.Shape().Elements())); !x.Meta || diag.From(err).Code != codeCaller {
			t.Errorf("%s: %v, %v", x.Name, x.Meta, err)
		}
	}
}

func TestOpen(t *testing.T) {
	dir := t.TempDir()
	path := filepath.Join(dir, "tied.pt2")
	data := unpack(t, "tied.pt2")
	if err := os.WriteFile(path, data, 0o600); err != nil {
		t.Fatal(err)
	}
	a := must[*Archive](t)(Open(path))
	w := must[*Tensor](t)(a.Tensor("wte.weight"))
	if err := w.Read(make([]float32, w.Shape().Elements())); err != nil {
		t.Error(err)
	}
	// The file becomes shorter: an error, and no crash.
	if err := os.Truncate(path, w.entry.at+10); err != nil {
		t.Fatal(err)
	}
	if _, err := w.Bytes(); diag.From(err).Code != codeFile || !strings.Contains(err.Error(), "shorter") {
		t.Error(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if err := a.Close(); err != nil {
		t.Error(err)
	}
	if _, err := w.Bytes(); diag.From(err).Code != codeClosed {
		t.Error(err)
	}
	// A changed bit of a weight is seen when it is read.
	data[w.entry.at+5] ^= 1
	b := must[*Archive](t)(Parse("changed", data))
	if _, err := must[*Tensor](t)(b.Tensor("wte.weight")).Bytes(); err == nil || !strings.Contains(err.Error(), "CRC") {
		t.Error(err)
	}
	for _, bad := range []string{dir, filepath.Join(dir, "none")} {
		if _, err := Open(bad); diag.From(err).Code == diag.Internal || !strings.Contains(diag.From(err).Where, bad) {
			t.Errorf("%v", err)
		}
	}
}

// A storage of 5 GiB, as torch writes it, in a file that is mostly a hole: sizes and offsets of 64
// bits, of which no part is read that is not asked for.
func TestLarge(t *testing.T) {
	const storage = 5 << 30
	config := swap(goodWeights, `"storage_offset": {"as_int": 0}`, fmt.Sprintf(`"storage_offset": {"as_int": %d}`, storage/4-6))
	all := goodMembers(goodProgram, config)
	weight, rest := all[0], all[1:]
	head := make([]byte, localSize)
	copy(head, localSign)
	little.PutUint16(head[6:], flagDeferred)
	little.PutUint16(head[26:], uint16(len(weight.name)))
	head = append(head, weight.name...)
	shift := int64(len(head)) + storage
	packed := zipped(false, rest...)
	begin := int64(little.Uint32(packed[len(packed)-6:]))
	old := packed[begin : len(packed)-endSize]

	directory := make([]byte, centralSize)
	copy(directory, centralSign)
	little.PutUint16(directory[8:], flagDeferred)
	little.PutUint64(directory[20:], 1<<64-1) // both sizes
	little.PutUint16(directory[28:], uint16(len(weight.name)))
	little.PutUint16(directory[30:], 20)
	directory = append(append(directory, weight.name...), 1, 0, 16, 0)
	directory = little.AppendUint64(little.AppendUint64(directory, storage), storage)
	for len(old) > 0 {
		n := centralSize + int(little.Uint16(old[28:]))
		at := int64(little.Uint32(old[42:]))
		little.PutUint32(old[42:], 1<<32-1)
		little.PutUint16(old[30:], 12)
		directory = append(append(directory, old[:n]...), 1, 0, 8, 0)
		directory = little.AppendUint64(directory, uint64(at+shift))
		old = old[n:]
	}
	end := make([]byte, end64Size+locatorSize+endSize)
	copy(end, end64Sign)
	little.PutUint64(end[24:], uint64(len(all)))
	little.PutUint64(end[32:], uint64(len(all)))
	little.PutUint64(end[40:], uint64(len(directory)))
	little.PutUint64(end[48:], uint64(begin+shift))
	copy(end[end64Size:], locatorSign)
	little.PutUint64(end[end64Size+8:], uint64(begin+shift)+uint64(len(directory)))
	last := end[end64Size+locatorSize:]
	copy(last, endSign)
	little.PutUint16(last[8:], uint16(len(all)))
	little.PutUint16(last[10:], uint16(len(all)))
	little.PutUint32(last[12:], uint32(len(directory)))
	little.PutUint32(last[16:], 1<<32-1)

	path := filepath.Join(t.TempDir(), "large.pt2")
	f := must[*os.File](t)(os.Create(path))
	for _, part := range []struct {
		at   int64
		data []byte
	}{{0, head}, {shift - 24, []byte(weight.data)}, {shift, packed[:begin]}, {shift + begin, append(directory, end...)}} {
		if _, err := f.WriteAt(part.data, part.at); err != nil {
			t.Skip(err)
		}
	}
	if err := f.Close(); err != nil {
		t.Fatal(err)
	}
	a := must[*Archive](t)(Open(path))
	defer a.Close()
	numbers := make([]float32, 6)
	if err := must[*Tensor](t)(a.Tensor("l.weight")).Read(numbers); err != nil || !slices.Equal(numbers, []float32{1, 1, 1, 1, 1, 1}) {
		t.Errorf("%v, %v", numbers, err)
	}
}

func BenchmarkParse(b *testing.B) {
	data := unpack(b, "deepseek_v3.pt2")
	b.SetBytes(int64(len(data)))
	b.ReportAllocs()
	for b.Loop() {
		must[*Archive](b)(Parse("deepseek_v3", data))
	}
}

// Beside each model stands what eager PyTorch computes: every input and output by the program's
// names, and a gradient of every parameter, of tied ones by the first name. Plain exports of a model
// share its numbers.
func TestExpected(t *testing.T) {
	for _, name := range fixtures(t) {
		if slices.Contains([]string{"storages", "meta", "words", "deep4", "deep64"}, name) ||
			strings.HasSuffix(name, "_old") || strings.HasPrefix(name, "no_") {
			continue
		}
		a := open(t, name)
		numbers := strings.TrimSuffix(name, "_plain") + ".safetensors"
		set := must[*safetensors.Set](t)(safetensors.Parse(name, unpack(t, numbers)))
		first := map[string]string{}
		for _, group := range a.Tied() {
			for _, other := range group {
				first[other] = group[0]
			}
		}
		for _, s := range slices.Concat(a.Program.Inputs, a.Program.Outputs) {
			want := s.Name
			switch s.Kind {
			case Parameter:
				if tied, ok := first[s.Name]; ok {
					want = tied
				}
				want = "grad." + want
			case UserInput, UserOutput:
			default:
				continue
			}
			shape, err := set.Shape(want)
			if err != nil {
				t.Errorf("%s: %v", name, err)
				continue
			}
			v := a.Program.Graph.Values[string(s.Arg.(Ref))]
			if want == "loss" {
				v.Dims = []Expr{integer(1)} // safetensors has it as one element
			}
			same := v.Type == shape.Type && len(v.Dims) == len(shape.Dims)
			for i := 0; same && i < len(v.Dims); i++ {
				n, err := v.Dims[i].Eval(map[string]int64{"s72": 2, "s38": 6, "s97": 2})
				same = err == nil && n == shape.Dims[i]
			}
			if !same {
				t.Errorf("%s: %s is %v, the program says %s%v", name, want, shape, v.Type, v.Dims)
			}
		}
		must[error](t)(nil, set.Close())
	}
}

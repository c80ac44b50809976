package safetensors

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"testing"

	"github.com/google/go-cmp/cmp"

	"github.com/deepwell/deepwell/dtype"
)

// expected is what the reference library said of the files it wrote (testdata/make.py).
type expected struct {
	Files map[string]struct {
		Metadata map[string]string
		Tensors  map[string]struct {
			Dtype  string
			Shape  []int64
			SHA256 string
		}
	}
	Boxes []struct {
		Tensor      string
		Start, Size []int64
		Hex         string
	}
}

func reference(t testing.TB) expected {
	t.Helper()
	var want expected
	text, err := os.ReadFile("testdata/expected.json")
	if err != nil {
		t.Fatal(err)
	}
	if err := json.Unmarshal(text, &want); err != nil {
		t.Fatal(err)
	}
	return want
}

func TestReadsWhatTheReferenceWrote(t *testing.T) {
	for file, want := range reference(t).Files {
		set, err := Open(filepath.Join("testdata", file))
		if file == "foreign.safetensors" {
			if err == nil || !strings.Contains(err.Error(), "F8_E4M3FNUZ") {
				t.Errorf("%s: %v", file, err)
			}
			continue
		}
		if err != nil {
			t.Fatal(err)
		}
		info := set.Files()[0]
		if len(set.Names()) != len(want.Tensors) || info.Tensors != len(want.Tensors) {
			t.Errorf("%s: %q", file, set.Names())
		}
		if d := cmp.Diff(want.Metadata, info.Metadata); d != "" {
			t.Errorf("%s: metadata: %s", file, d)
		}
		for name, w := range want.Tensors {
			tensor, err := set.Tensor(name)
			if err != nil {
				t.Fatal(err)
			}
			view, err := tensor.Bytes()
			if err != nil {
				t.Fatal(err)
			}
			shape := tensor.Shape()
			if types[typeRank(shape.Type)].name != w.Dtype || !slices.Equal(shape.Dims, w.Shape) {
				t.Errorf("%s: %s is %v, want %s%v", file, name, shape, w.Dtype, w.Shape)
			}
			if got := sha256.Sum256(view); hex.EncodeToString(got[:]) != w.SHA256 {
				t.Errorf("%s: %s holds other bytes", file, name)
			}
		}
		must(t, set.Close())
	}
}

func TestReadsTheReferencesBoxes(t *testing.T) {
	set, err := Open("testdata/shapes.safetensors")
	must(t, err)
	defer set.Close()
	for _, b := range reference(t).Boxes {
		tensor, err := set.Tensor(b.Tensor)
		must(t, err)
		dst := make([]byte, len(b.Hex)/2)
		must(t, tensor.ReadSlice(dst, b.Start, b.Size))
		if hex.EncodeToString(dst) != b.Hex {
			t.Errorf("%s from %d size %d: %x, want %s", b.Tensor, b.Start, b.Size, dst, b.Hex)
		}
	}
}

// Every element type of Deepwell is written, or refused by name; the types of the format are all in
// the reference's file.
func TestEveryTypeHasItsPlace(t *testing.T) {
	set, err := Open("testdata/types.safetensors")
	must(t, err)
	defer set.Close()
	seen := map[dtype.DType]bool{}
	for _, name := range set.Names() {
		shape, err := set.Shape(name)
		must(t, err)
		seen[shape.Type] = true
	}
	for i, row := range types {
		if !seen[row.DType] {
			t.Errorf("the reference's file holds no %s", row.name)
		}
		if i > 0 && row.Bits() < types[i-1].Bits() && row.DType != dtype.F4E2M1FN {
			t.Errorf("%s stands after a wider type", row.name)
		}
	}
	for _, d := range dtype.All() {
		_, err := Write(io.Discard, []Item{{"x", dtype.Shape{Type: d, Dims: []int64{0}}, FromBytes(nil)}}, nil)
		if ok := err == nil; ok != seen[d] {
			t.Errorf("%v: written: %v, of the format: %v", d, ok, seen[d])
		}
	}
}

// exercise calls every method of a set and closes it; it is also the body of the fuzz test.
func exercise(t testing.TB, set *Set) {
	t.Helper()
	names := set.Names()
	if !slices.IsSorted(names) {
		t.Error("the names are not sorted")
	}
	total := int64(0)
	for _, name := range names {
		tensor, err := set.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		total += tensor.Size()
		shape, err := set.Shape(name)
		if err != nil || !shape.Equal(tensor.Shape()) || tensor.Name() != name || shape.Bytes() != tensor.Size() {
			t.Fatalf("%s is %v, %v, %d bytes, %v", name, shape, tensor.Shape(), tensor.Size(), err)
		}
		view, err := tensor.Bytes()
		if err != nil || int64(len(view)) != tensor.Size() {
			t.Fatalf("%d bytes, %v", len(view), err)
		}
		var copied bytes.Buffer
		if err := tensor.CopyTo(&copied); err != nil || !bytes.Equal(copied.Bytes(), view) {
			t.Fatalf("CopyTo gave other bytes, %v", err)
		}
		whole := make([]byte, len(view))
		if err := tensor.ReadSlice(whole, make([]int64, len(shape.Dims)), shape.Dims); err != nil ||
			!bytes.Equal(whole, view) {
			t.Fatalf("ReadSlice gave other bytes, %v", err)
		}
		part := make([]byte, len(view)+1)
		if n, err := tensor.ReadAt(part, 0); n != len(view) || !errors.Is(err, io.EOF) || !bytes.Equal(part[:n], view) {
			t.Fatalf("ReadAt gave %d bytes, %v", n, err)
		}
		if n, err := tensor.ReadAt(part, 1<<63-1); n != 0 || !errors.Is(err, io.EOF) {
			t.Fatalf("ReadAt beyond the end gave %d, %v", n, err)
		}
	}
	for _, f := range set.Files() {
		if strings.ContainsAny(f.Name, `/\`) || f.Bytes < 10 {
			t.Errorf("file %+v", f)
		}
		total -= f.Bytes
	}
	if len(set.shards) == 1 && -total != set.shards[0].base {
		t.Errorf("the tensors leave %d bytes for a header of %d", -total, set.shards[0].base)
	}
	_ = set.Extra()
	_, err := set.Tensor("no such\x00 tensor")
	if err == nil {
		t.Error("a name that no file may hold was found")
	}
	if err := set.Close(); err != nil {
		t.Error(err)
	}
	if len(names) > 0 {
		afterClose(t, set, names[0])
	}
}

func afterClose(t testing.TB, set *Set, name string) {
	t.Helper()
	tensor, err := set.Tensor(name)
	if err != nil {
		t.Fatal(err)
	}
	gone := codeClosed
	if _, err := tensor.Bytes(); !errors.Is(err, gone) {
		t.Errorf("Bytes after Close: %v", err)
	}
	if _, err := tensor.ReadAt(make([]byte, 1), 0); !errors.Is(err, gone) {
		t.Errorf("ReadAt after Close: %v", err)
	}
	shape := tensor.Shape()
	buf := make([]byte, tensor.Size())
	if err := tensor.ReadSlice(buf, make([]int64, len(shape.Dims)), shape.Dims); !errors.Is(err, gone) {
		t.Errorf("ReadSlice after Close: %v", err)
	}
	if err := set.Close(); err != nil {
		t.Errorf("second Close: %v", err)
	}
}

func TestEveryMethodOnRealFiles(t *testing.T) {
	for _, path := range []string{"types.safetensors", "shapes.safetensors", "names.safetensors",
		"nothing.safetensors", "sharded", "sharded/model.safetensors.index.json"} {
		set, err := Open(filepath.Join("testdata", path))
		if err != nil {
			t.Fatal(err)
		}
		exercise(t, set)
	}
}

func TestShardsAreOneSpaceOfNames(t *testing.T) {
	set, err := Open("testdata/sharded")
	must(t, err)
	defer set.Close()
	want := []string{"embed.weight", "layers.0.weight", "layers.1.weight", "norm.weight"}
	if d := cmp.Diff(want, set.Names()); d != "" {
		t.Error(d)
	}
	tensor, err := set.Tensor("norm.weight")
	must(t, err)
	if tensor.File() != shard2 || len(set.Files()) != 2 || len(set.Extra()) != 0 {
		t.Errorf("%s, %v, %q", tensor.File(), set.Files(), set.Extra())
	}
	_, err = set.Tensor("norm.wieght")
	if err == nil || !strings.Contains(err.Error(), `did you mean "norm.weight"`) {
		t.Error(err)
	}
}

func TestNamesNeedNoShards(t *testing.T) {
	for _, path := range []string{"testdata/sharded", "testdata/shapes.safetensors"} {
		set, err := Open(path)
		must(t, err)
		got, err := Names(path)
		must(t, err)
		if d := cmp.Diff(set.Names(), got); d != "" {
			t.Error(d)
		}
		must(t, set.Close())
	}
	dir := t.TempDir()
	text, err := os.ReadFile(filepath.Join("testdata/sharded", theIdx))
	must(t, err)
	put(t, dir, theIdx, text)
	got, err := Names(dir)
	if err != nil || len(got) != 4 {
		t.Errorf("%q, %v", got, err)
	}
	if _, err := Open(dir); err == nil || !strings.Contains(err.Error(), "2 of 2 shards are missing") {
		t.Error(err)
	}
	for _, bad := range []string{"none", "pipe"} {
		if _, err := Names(filepath.Join(dir, bad)); err == nil {
			t.Errorf("%s has names", bad)
		}
	}
}

func TestExtraTensorsAreSeenAndNotInTheSet(t *testing.T) {
	dir := t.TempDir()
	model(`{"weight_map":{"a":"<1>","b":"<2>"}}`)(t, dir)
	put(t, dir, shard1, raw(`{"a":{"dtype":"U8","shape":[2],"data_offsets":[0,2]},"inv_freq":{"dtype":"U8","shape":[2],"data_offsets":[2,4]}}`, "abcd"))
	set, err := Open(dir)
	must(t, err)
	if d := cmp.Diff([]string{"inv_freq"}, set.Extra()); d != "" {
		t.Error(d)
	}
	if _, err := set.Tensor("inv_freq"); err == nil {
		t.Error("an extra tensor is in the set")
	}
	must(t, set.Close())
}

// transformers looks for the single file first; so do we.
func TestTheSingleFileComesFirst(t *testing.T) {
	dir := t.TempDir()
	model(`{"weight_map":{"a":"<1>","b":"<2>"}}`)(t, dir)
	put(t, dir, "model.safetensors", raw(strings.Replace(good, `"a"`, `"single"`, 1), "abcd"))
	set, err := Open(dir)
	must(t, err)
	if d := cmp.Diff([]string{"single"}, set.Names()); d != "" {
		t.Error(d)
	}
	must(t, set.Close())
	set, err = Open(filepath.Join(dir, theIdx))
	must(t, err)
	if len(set.Names()) != 2 {
		t.Errorf("%q", set.Names())
	}
	must(t, set.Close())
}

func TestFileThatBecomesShorterIsAnErrorNotASignal(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.safetensors")
	n := int64(1 << 20)
	_, err := WriteFile(path, []Item{{"a", dtype.Shape{Type: dtype.U8, Dims: []int64{n}}, FromBytes(make([]byte, n))}}, nil)
	must(t, err)
	set, err := Open(path)
	must(t, err)
	defer set.Close()
	tensor, err := set.Tensor("a")
	must(t, err)
	must(t, os.Truncate(path, 4096))
	for name, use := range map[string]func() error{
		"Bytes":     func() error { _, err := tensor.Bytes(); return err },
		"ReadAt":    func() error { _, err := tensor.ReadAt(make([]byte, n), 0); return err },
		"ReadSlice": func() error { return tensor.ReadSlice(make([]byte, 10), []int64{n - 10}, []int64{10}) },
		"CopyTo":    func() error { return tensor.CopyTo(io.Discard) },
	} {
		if err := use(); !errors.Is(err, codeFile) || !strings.Contains(err.Error(), "shorter") {
			t.Errorf("%s: %v", name, err)
		}
	}
}

// A reader whose file changes between the length and the header.
type shrinking struct{ *bytes.Reader }

func (s shrinking) ReadAt(p []byte, off int64) (int, error) {
	if off > 0 {
		return 0, io.EOF
	}
	return s.Reader.ReadAt(p, off)
}

func TestFileThatShrinksWhileItIsOpened(t *testing.T) {
	data := raw(good+strings.Repeat(" ", 100), "abcd")
	_, err := newShard("x", shrinking{bytes.NewReader(data)}, int64(len(data)))
	if err == nil || !strings.Contains(err.Error(), "shorter") {
		t.Error(err)
	}
}

// unmapped takes the mapping away, as on a file system without mmap.
func unmapped(t *testing.T, set *Set) {
	for _, s := range set.shards {
		must(t, s.unmap())
		s.memory = nil
	}
}

func TestFileThatCannotBeMapped(t *testing.T) {
	set, err := Open("testdata/sharded")
	must(t, err)
	unmapped(t, set)
	exercise(t, set)
}

func TestSparseFileOfEightTebibytes(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.safetensors")
	const n = 8 << 40
	header := one("F32", fmt.Sprintf("[%d,8]", n/32), fmt.Sprintf("[0,%d]", int64(n)))
	must(t, os.WriteFile(path, raw(header, ""), 0o644))
	if err := os.Truncate(path, int64(prefixBytes+len(header))+n); err != nil {
		t.Skip("the disk holds no such file: ", err)
	}
	set, err := Open(path)
	must(t, err)
	defer set.Close()
	tensor, err := set.Tensor("a")
	must(t, err)
	must(t, tensor.ReadSlice(make([]byte, 24), []int64{n/32 - 2, 1}, []int64{2, 3}))
	unmapped(t, set)
	if _, err := tensor.Bytes(); err == nil || !strings.Contains(err.Error(), "read it in slices") {
		t.Error(err)
	}
	must(t, tensor.ReadSlice(make([]byte, 24), []int64{n/32 - 2, 1}, []int64{2, 3}))
}

func TestHundredThousandTensors(t *testing.T) {
	var items []Item
	for i := range 100_000 {
		items = append(items, Item{fmt.Sprintf("layers.%d.weight", i),
			dtype.Shape{Type: dtype.U8, Dims: []int64{1}}, FromBytes([]byte{byte(i)})})
	}
	var b bytes.Buffer
	_, err := Write(&b, items, nil)
	must(t, err)
	set, err := Parse("x", b.Bytes())
	must(t, err)
	tensor, err := set.Tensor("layers.777.weight")
	must(t, err)
	if view, err := tensor.Bytes(); err != nil || view[0] != 777%256 {
		t.Errorf("%v, %v", view, err)
	}
	if _, err := set.Tensor("layers.x"); err == nil {
		t.Error("found")
	}
}

func TestManyReadersAndOneClose(t *testing.T) {
	set, err := Open("testdata/sharded")
	must(t, err)
	var wg sync.WaitGroup
	for range 8 {
		wg.Go(func() {
			for _, name := range set.Names() {
				tensor, err := set.Tensor(name)
				if err != nil {
					t.Error(err)
					return
				}
				buf := make([]byte, tensor.Size())
				if _, err := tensor.ReadAt(buf, 0); err != nil && !errors.Is(err, codeClosed) {
					t.Error(err)
				}
			}
		})
	}
	must(t, set.Close())
	wg.Wait()
}

package safetensors

import (
	"bytes"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"github.com/google/go-cmp/cmp"
	"pgregory.net/rapid"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/dtype"
)

// again makes items of a set's tensors, in the wrong order.
func again(t testing.TB, set *Set) []Item {
	t.Helper()
	var items []Item
	for _, name := range slices.Backward(set.Names()) {
		tensor, err := set.Tensor(name)
		must(t, err)
		items = append(items, Item{name, tensor.Shape(), tensor.CopyTo})
	}
	return items
}

func TestWritesTheReferencesBytes(t *testing.T) {
	for file := range reference(t).Files {
		if file == "foreign.safetensors" {
			continue
		}
		path := filepath.Join("testdata", file)
		set, err := Open(path)
		must(t, err)
		var got bytes.Buffer
		f, err := Write(&got, again(t, set), set.Files()[0].Metadata)
		must(t, err)
		want, err := os.ReadFile(path)
		must(t, err)
		if !bytes.Equal(got.Bytes(), want) {
			t.Errorf("%s:\n%q\nwant\n%q", file, got.Bytes(), want)
		}
		if sum := sha256.Sum256(want); f.SHA256 != hex.EncodeToString(sum[:]) || f.Bytes != int64(len(want)) {
			t.Errorf("%s: reported %+v", file, f)
		}
		must(t, set.Close())
	}
}

func TestWritesTheReferencesFolder(t *testing.T) {
	set, err := Open("testdata/sharded")
	must(t, err)
	defer set.Close()
	dir := t.TempDir()
	files, err := WriteFolder(dir, again(t, set), Options{MaxBytes: 192, Metadata: map[string]string{"format": "pt"}})
	must(t, err)
	if len(files) != 2 || files[1].Name != shard2 || files[1].Tensors != 2 {
		t.Errorf("%+v", files)
	}
	must(t, fs.WalkDir(os.DirFS("testdata/sharded"), ".", func(name string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		want, err := os.ReadFile(filepath.Join("testdata/sharded", name))
		if err != nil {
			return err
		}
		got, err := os.ReadFile(filepath.Join(dir, name))
		if !bytes.Equal(got, want) {
			t.Errorf("%s:\n%s\nwant\n%s", name, got, want)
		}
		return err
	}))
	left, err := os.ReadDir(dir)
	if err != nil || len(left) != 3 {
		t.Errorf("%v, %v", left, err)
	}
	if _, err := WriteFolder(dir, again(t, set), Options{}); err == nil || !strings.Contains(err.Error(), "holds model-00001-of-00002.safetensors already") {
		t.Error(err)
	}
}

func TestFolderOfOneFile(t *testing.T) {
	for _, limit := range []int64{0, 1 << 30} {
		dir := t.TempDir()
		files, err := WriteFolder(dir, small(), Options{MaxBytes: limit})
		must(t, err)
		if len(files) != 1 || files[0].Name != "model.safetensors" {
			t.Errorf("%+v", files)
		}
		if names, err := Names(dir); err != nil || !slices.Equal(names, []string{"a", "b"}) {
			t.Errorf("%q, %v", names, err)
		}
		set, err := Open(dir)
		must(t, err)
		exercise(t, set)
	}
}

func small() []Item {
	return []Item{
		{"a", dtype.Shape{Type: dtype.F32, Dims: []int64{2}}, FromBytes(make([]byte, 8))},
		{"b", dtype.Shape{Type: dtype.U8, Dims: []int64{3}}, FromBytes([]byte("xyz"))},
	}
}

func TestWriterRefuses(t *testing.T) {
	item := func(name string, d dtype.DType, dims ...int64) []Item {
		return []Item{{name, dtype.Shape{Type: d, Dims: dims}, FromBytes(nil)}}
	}
	for words, items := range map[string][]Item{
		"empty name":                       item("", dtype.U8, 0),
		"at most 4096":                     item(strings.Repeat("x", 5000), dtype.U8, 0),
		"control character":                item("a\nb", dtype.U8, 0),
		"not UTF-8":                        item("a\xff", dtype.U8, 0),
		"called __metadata__":              item("__metadata__", dtype.U8, 0),
		"no element type s4":               item("a", dtype.S4, 2),
		"no element type c128":             item("a", dtype.C128, 2),
		"no element type invalid":          item("a", dtype.Invalid),
		"is negative":                      item("a", dtype.U8, -1),
		"overflows":                        item("a", dtype.U8, 1<<40, 1<<40),
		"65 dimensions":                    item("a", dtype.U8, slices.Repeat([]int64{1}, 65)...),
		"whole byte":                       item("a", dtype.F4E2M1FN, 3),
		"stands twice":                     append(item("a", dtype.U8, 0), item("a", dtype.U8, 0)...),
		"no source":                        {{Name: "a", Shape: dtype.Shape{Type: dtype.U8}}},
		"gave less than the 4 bytes":       item("a", dtype.F32),
		"gave more than the 1 bytes of u8": {{"a", dtype.Shape{Type: dtype.U8}, FromBytes([]byte("xy"))}},
	} {
		dir := t.TempDir()
		_, err := WriteFile(filepath.Join(dir, "x.safetensors"), items, nil)
		if err == nil || !strings.Contains(err.Error(), words) {
			t.Errorf("%s: %v", words, err)
		}
		if code := diag.From(err).Code; code != codeCaller && code != diag.BufferMismatch {
			t.Errorf("%s: code %s", words, code)
		}
		if left, err := os.ReadDir(dir); err != nil || len(left) != 0 {
			t.Errorf("%s: left %v, %v", words, left, err)
		}
	}
	if _, err := Write(io.Discard, nil, map[string]string{"a": "\xff"}); err == nil {
		t.Error("metadata that is not UTF-8 was written")
	}
	if _, err := WriteFolder(t.TempDir(), nil, Options{MaxBytes: -1}); err == nil {
		t.Error("a negative limit was taken")
	}
	if _, err := WriteFolder(filepath.Join(t.TempDir(), "none"), nil, Options{}); diag.From(err).Code != codeFile {
		t.Error(err)
	}
	huge := []Item{}
	for _, name := range []string{"a", "b", "c", "d"} {
		huge = append(huge, Item{name, dtype.Shape{Type: dtype.U8, Dims: []int64{1<<60 - 1}}, FromBytes(nil)})
	}
	for range 3 {
		huge = append(huge, slices.Clone(huge)...)
	}
	for i := range huge {
		huge[i].Name = fmt.Sprint(i)
	}
	if _, err := Write(io.Discard, huge, nil); err == nil || !strings.Contains(err.Error(), "sizes overflow") {
		t.Error(err)
	}
}

func TestFailingSourceLeavesTheOldFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "x.safetensors")
	_, err := WriteFile(path, small(), nil)
	must(t, err)
	before, err := os.ReadFile(path)
	must(t, err)
	stop := errors.New("the disk is gone")
	items := small()
	items[1].Data = func(w io.Writer) error {
		if _, err := io.WriteString(w, "x"); err != nil {
			return err
		}
		return stop
	}
	if _, err := WriteFile(path, items, nil); !errors.Is(err, stop) || diag.From(err).Code != codeFile {
		t.Errorf("%v", err)
	}
	after, err := os.ReadFile(path)
	if err != nil || !bytes.Equal(before, after) {
		t.Errorf("the file changed: %v", err)
	}
}

// drawItems gives tensors of random names, types and shapes with random bytes.
func drawItems(t *rapid.T) (items []Item, data map[string][]byte) {
	data = map[string][]byte{}
	names := rapid.SliceOfNDistinct(rapid.OneOf(
		rapid.StringMatching(`[a-c]{1,2}(\.[0-9]{1,2}){0,2}`),
		rapid.StringMatching(`["\\/é 🧊\.]{1,4}`)), 0, 8, rapid.ID[string]).Draw(t, "names")
	for _, name := range names {
		shape := dtype.Shape{Type: types[rapid.IntRange(0, len(types)-1).Draw(t, "type")].DType}
		shape.Dims = rapid.SliceOfN(rapid.Int64Range(0, 5), 0, 4).Draw(t, "dims")
		if shape.Type.Bits() < 8 {
			shape.Dims = append(shape.Dims, rapid.Int64Range(0, 3).Draw(t, "pairs")*2)
		}
		bytes := rapid.SliceOfN(rapid.Byte(), int(shape.Bytes()), int(shape.Bytes())).Draw(t, "bytes")
		items = append(items, Item{name, shape, FromBytes(bytes)})
		data[name] = bytes
	}
	return items, data
}

func TestRoundTrip(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		items, data := drawItems(t)
		metadata := rapid.MapOfN(rapid.String(), rapid.String(), 0, 3).Draw(t, "metadata")
		var first, second bytes.Buffer
		f1, err := Write(&first, items, metadata)
		if err != nil {
			t.Fatal(err)
		}
		f2, err := Write(&second, rapid.Permutation(items).Draw(t, "order"), metadata)
		if err != nil || f1.SHA256 != f2.SHA256 || !bytes.Equal(first.Bytes(), second.Bytes()) {
			t.Fatalf("the order of the items changes the bytes, %v", err)
		}
		set, err := Parse("x", first.Bytes())
		if err != nil {
			t.Fatal(err)
		}
		if len(metadata) > 0 {
			if d := cmp.Diff(metadata, set.Files()[0].Metadata); d != "" {
				t.Fatal(d)
			}
		}
		if len(set.Names()) != len(items) || set.shards[0].base%8 != 0 {
			t.Fatalf("%q; data begins at %d", set.Names(), set.shards[0].base)
		}
		for _, it := range items {
			tensor, err := set.Tensor(it.Name)
			if err != nil {
				t.Fatal(err)
			}
			view, err := tensor.Bytes()
			if err != nil || !bytes.Equal(view, data[it.Name]) || !tensor.Shape().Equal(it.Shape) {
				t.Fatalf("%s came back as %v %x, %v", it.Name, tensor.Shape(), view, err)
			}
			if align := int64(max(8, it.Shape.Type.Bits()) / 8); tensor.e.begin%align != 0 {
				t.Fatalf("%s %v begins at %d", it.Name, it.Shape, tensor.e.begin)
			}
		}
	})
}

func TestShardingKeepsEverything(t *testing.T) {
	rapid.Check(t, func(t *rapid.T) {
		items, data := drawItems(t)
		limit := rapid.Int64Range(0, 200).Draw(t, "limit")
		parts, err := splitFiles(items, Options{MaxBytes: limit})
		if err != nil {
			t.Fatal(err)
		}
		seen := 0
		for i, l := range parts {
			if limit > 0 && l.data > limit && len(l.items) > 1 {
				t.Fatalf("file %d holds %d bytes of at most %d", i, l.data, limit)
			}
			if len(l.items) == 0 && len(items) > 0 || limit == 0 && len(parts) > 1 {
				t.Fatalf("%d files, file %d holds %d tensors", len(parts), i, len(l.items))
			}
			seen += len(l.items)
			var b bytes.Buffer
			if _, err := l.write(&b); err != nil {
				t.Fatal(err)
			}
			set, err := Parse("x", b.Bytes())
			if err != nil {
				t.Fatal(err)
			}
			compare(t, set, data)
		}
		if seen != len(items) {
			t.Fatalf("%d of %d tensors were written", seen, len(items))
		}
	})
}

// compare demands that every tensor of a set has the bytes of that name.
func compare(t fataler, set *Set, data map[string][]byte) {
	t.Helper()
	for _, name := range set.Names() {
		tensor, err := set.Tensor(name)
		if err != nil {
			t.Fatal(err)
		}
		if view, err := tensor.Bytes(); err != nil || !bytes.Equal(view, data[name]) {
			t.Fatal(name, "came back as", view, err)
		}
	}
}

// The same on a disk, with few examples because each file is synced.
func TestFoldersComeBack(t *testing.T) {
	type example struct {
		items []Item
		data  map[string][]byte
	}
	examples := rapid.Custom(func(t *rapid.T) example {
		items, data := drawItems(t)
		return example{items, data}
	})
	for seed := range 4 {
		ex, dir := examples.Example(seed), t.TempDir()
		files, err := WriteFolder(dir, ex.items, Options{MaxBytes: 100})
		must(t, err)
		set, err := Open(dir)
		must(t, err)
		if len(set.Names()) != len(ex.items) || len(set.Extra()) > 0 || len(set.Files()) != len(files) {
			t.Errorf("%q of %d, %v", set.Names(), len(ex.items), files)
		}
		compare(t, set, ex.data)
		for i, s := range set.shards {
			whole, err := os.ReadFile(s.name)
			if sum := sha256.Sum256(whole); err != nil || files[i].SHA256 != hex.EncodeToString(sum[:]) {
				t.Errorf("%s has another SHA-256 than was reported, %v", s.name, err)
			}
		}
		must(t, set.Close())
	}
}

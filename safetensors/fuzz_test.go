package safetensors

import (
	"bytes"
	"os"
	"path/filepath"
	"slices"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

func FuzzOpen(f *testing.F) {
	for _, row := range hostiles() {
		if len(row.data) > 0 && len(row.data) < 4096 {
			f.Add(row.data)
		}
	}
	paths, err := filepath.Glob("testdata/*.safetensors")
	if err != nil || len(paths) == 0 {
		f.Fatal(paths, err)
	}
	for _, path := range paths {
		data, err := os.ReadFile(path)
		if err != nil {
			f.Fatal(err)
		}
		f.Add(data)
	}
	f.Fuzz(func(t *testing.T, data []byte) {
		set, err := Parse("fuzz", data)
		if err != nil {
			if e := diag.From(err); e.Code != codeFormat || e.Fix == "" {
				t.Errorf("%v", err)
			}
			return
		}
		var once, twice bytes.Buffer
		if _, err := Write(&once, again(t, set), set.Files()[0].Metadata); err != nil {
			t.Fatalf("what was read cannot be written: %v", err)
		}
		back, err := Parse("again", once.Bytes())
		if err != nil {
			t.Fatalf("what was written cannot be read: %v", err)
		}
		if !slices.Equal(back.Names(), set.Names()) {
			t.Errorf("%q became %q", set.Names(), back.Names())
		}
		if _, err := Write(&twice, again(t, back), back.Files()[0].Metadata); err != nil ||
			!bytes.Equal(once.Bytes(), twice.Bytes()) {
			t.Errorf("the bytes changed on the second way, %v", err)
		}
		exercise(t, back)
		exercise(t, set)
	})
}

func FuzzIndex(f *testing.F) {
	for _, text := range []string{
		`{"metadata":{"total_size":8.0,"x":[{}]},"weight_map":{"a":"m.safetensors"},"more":null}`,
		`{"weight_map":{"a":"../m.safetensors"}}`, `{"weight_map":{"a":"m.safetensors","a":"m.safetensors"}}`,
		`{"a":[[[true,-1.5e3,"\ud83e\uddca"]]]}`, `{`, ``, `{"weight_map":{}}x`,
	} {
		f.Add(text)
	}
	f.Fuzz(func(t *testing.T, text string) {
		homes, err := parseIndex(text)
		if err != nil {
			if e := diag.From(err); e.Code != codeFormat || e.Fix == "" {
				t.Errorf("%v", err)
			}
			return
		}
		for i, h := range homes {
			if i > 0 && homes[i-1].tensor >= h.tensor || filepath.Base(h.file) != h.file || h.file == ".." {
				t.Errorf("%q", homes)
			}
		}
		files := map[string]string{}
		for _, h := range homes {
			files[h.tensor] = h.file
		}
		if back, err := parseIndex(string(Index(files, 1))); err != nil || !slices.Equal(back, homes) {
			t.Errorf("%q came back as %q, %v", homes, back, err)
		}
	})
}

package capture

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// Whatever name is typed, the answer is an error with a code or a folder within the cache.
func FuzzHub(f *testing.F) {
	for _, s := range []string{"acme/rocket", "acme/rocket@main", "gpt2", "a/b@refs/pr/1", "../x", "a/b@../../x", "@", "a@b@c"} {
		f.Add(s)
	}
	cache := f.TempDir()
	f.Fuzz(func(t *testing.T, name string) {
		m, err := openHub(name, env(map[string]string{"HF_HUB_CACHE": cache}))
		if err == nil {
			t.Fatalf("%q is %s", name, m.Folder)
		}
		e, ok := errors.AsType[*diag.Error](err)
		if !ok || e.Code == diag.Internal {
			t.Fatalf("%q: %v", name, err)
		}
		if e.Code == diag.ModelMissing && filepath.Dir(e.Where) != cache {
			t.Fatalf("%q is looked for in %s", name, e.Where)
		}
		if e.Code == diag.ModelMissing && strings.ContainsAny(e.Fix[:strings.IndexByte(e.Fix, '\n')], "\";&|$`'<>\\") {
			t.Fatalf("the command for %q is %s", name, e.Fix)
		}
	})
}

// Any index gives a model or an error with a code.
func FuzzIndex(f *testing.F) {
	f.Add(`{"metadata": {"total_size": 8}, "weight_map": {"model.norm.weight": "model-00001-of-00001.safetensors"}}`)
	f.Add(`{"metadata": {"total_size": "x"}, "weight_map": {}}`)
	f.Add(`{"metadata": [], "weight_map": {"a": "b.safetensors"}}`)
	f.Add(`{"weight_map": {"a": "../b.safetensors"}}`)
	config, err := os.ReadFile(filepath.Join(fixtures, "llama3", "config.json"))
	if err != nil {
		f.Fatal(err)
	}
	f.Fuzz(func(t *testing.T, index string) {
		dir := t.TempDir()
		for name, text := range map[string][]byte{configName: config, indexName: []byte(index)} {
			if err := os.WriteFile(filepath.Join(dir, name), text, 0o644); err != nil {
				t.Fatal(err)
			}
		}
		m, err := Open(dir, Options{})
		if err == nil {
			err = m.Check()
			_ = m.Contents()
			_ = m.Summary(0)
		}
		if e, ok := errors.AsType[*diag.Error](err); err != nil && (!ok || e.Code == diag.Internal) {
			t.Fatal(err)
		}
	})
}

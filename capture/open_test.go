package capture

import (
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/diag"
)

const fixtures = "../model/testdata"

// env makes Options of variables.
func env(vars map[string]string) Options {
	return Options{Getenv: func(name string) string { return vars[name] }}
}

func copyFile(t *testing.T, to, from string) {
	t.Helper()
	b, err := os.ReadFile(from)
	if err == nil {
		err = os.MkdirAll(filepath.Dir(to), 0o755)
	}
	if err == nil {
		err = os.WriteFile(to, b, 0o644)
	}
	if err != nil {
		t.Fatal(err)
	}
}

func mustOpen(t *testing.T, source string, o Options) *Model {
	t.Helper()
	m, err := Open(source, o)
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = m.Close() })
	return m
}

// refused opens a source that must fail with a code and with words in the message.
func refused(t *testing.T, source string, o Options, code diag.Code, words ...string) {
	t.Helper()
	m, err := Open(source, o)
	if err == nil {
		_ = m.Close()
		t.Errorf("%s is opened", source)
		return
	}
	wantError(t, err, code, words...)
}

func wantError(t *testing.T, err error, code diag.Code, words ...string) {
	t.Helper()
	e, ok := errors.AsType[*diag.Error](err)
	if !ok || e.Code != code {
		t.Errorf("%v, not %s", err, code)
		return
	}
	for _, w := range words {
		if !strings.Contains(e.Format(), w) {
			t.Errorf("%q does not say %q", e.Format(), w)
		}
	}
}

func TestOpenPreset(t *testing.T) {
	for source, name := range map[string]string{
		"llama3.1-8b": "llama3.1-8b", "Llama3.1-8B": "llama3.1-8b", "meta-llama/Llama-3.1-8B": "llama3.1-8b",
		"preset:gpt2": "gpt2", "openai-community/gpt2": "gpt2", "deepseek-v3": "deepseek-v3",
	} {
		m := mustOpen(t, source, Options{})
		if m.Name != name || m.Config == nil || m.HasWeights() || m.Folder != "" {
			t.Errorf("%s is %+v", source, m)
		}
		if m.Contents() != nil {
			t.Errorf("%s has contents", source)
		}
	}
	refused(t, "llama3.1-7b", Options{}, diag.ModelUnknown, "neither a preset nor a folder",
		"did you mean llama3.1-8b, llama3.1-70b")
	refused(t, "preset:llama3.1-7b", Options{}, diag.ModelUnknown, "did you mean")
	refused(t, "zzzzzzzzzzzzzzzzzzzz", Options{}, diag.ModelUnknown, "deepwell models")
	refused(t, "nemotron-3-ultra", Options{}, diag.ModelMissing, "not public")
	refused(t, "", Options{}, diag.BadUsage)
	refused(t, "acme/rocket-7b", Options{}, diag.ModelUnknown, "hf:acme/rocket-7b")
	// The last word alone does not make a path a preset.
	refused(t, "nowhere/gpt2", Options{}, diag.ModelUnknown, "hf:nowhere/gpt2")
	refused(t, "./gpt2", Options{}, diag.ModelUnknown)
}

func TestPresetHasNoWeights(t *testing.T) {
	m := mustOpen(t, "llama3.1-8b", Options{})
	wantError(t, m.Check(), diag.ModelMissing, "hf:meta-llama/Llama-3.1-8B")
	p := m.Config.Params()[0]
	wantError(t, m.Read(&p, nil), diag.ModelMissing)
}

func TestOpenFolder(t *testing.T) {
	dir := t.TempDir()
	from := filepath.Join(fixtures, "llama3")
	for _, f := range []string{"config.json", "model.safetensors"} {
		copyFile(t, filepath.Join(dir, "tiny", f), filepath.Join(from, f))
	}
	copyFile(t, filepath.Join(dir, "tiny", "tokenizer.json"), filepath.Join(from, "config.json"))
	m := mustOpen(t, filepath.Join(dir, "tiny"), Options{})
	if m.Name != "tiny" || !m.HasWeights() || filepath.Base(m.Tokenizer) != "tokenizer.json" {
		t.Errorf("%+v", m)
	}
	if err := m.Check(); err != nil {
		t.Error(err)
	}
	// A file is a configuration alone, and begins from random weights.
	alone := mustOpen(t, filepath.Join(dir, "tiny", "config.json"), Options{})
	if alone.HasWeights() || alone.Folder != "" || alone.Name != "tiny" {
		t.Errorf("%+v", alone)
	}
	wantError(t, alone.Check(), diag.WeightsIncomplete, "named alone", filepath.Join(dir, "tiny"))
	copyFile(t, filepath.Join(dir, "zbare", "config.json"), filepath.Join(from, "config.json"))
	bare := mustOpen(t, filepath.Join(dir, "zbare", "config.json"), Options{})
	wantError(t, bare.Check(), diag.ModelMissing, "random weights")
	if bare.Lack() != nil || m.Lack() != nil {
		t.Error(bare.Lack(), m.Lack())
	}

	refused(t, filepath.Join(dir, "tiny", "model.safetensors"), Options{}, diag.BadInput, "give the folder")
	refused(t, filepath.Join(dir, "tiny", "missing.json"), Options{}, diag.ModelUnknown, "there is no file")
	refused(t, dir, Options{}, diag.BadInput, "has no config.json", filepath.Join(dir, "tiny"))

	t.Chdir(dir)
	if err := os.Rename("tiny", "gpt2"); err != nil {
		t.Fatal(err)
	}
	refused(t, "gpt2", Options{}, diag.BadUsage, "./gpt2", "preset:gpt2")
	if m := mustOpen(t, "./gpt2", Options{}); m.Config.Arch != "llama" {
		t.Errorf("./gpt2 is %s", m.Config.Arch)
	}
	t.Chdir("gpt2")
	if m := mustOpen(t, ".", Options{}); m.Name != "gpt2" {
		t.Errorf("the folder . is called %s", m.Name)
	}
}

func TestFolderWithoutConfig(t *testing.T) {
	for file, words := range map[string]string{
		"consolidated.00.pth": "Meta's own form", "m.gguf": "inference", "x.txt": "give the folder",
	} {
		dir := t.TempDir()
		copyFile(t, filepath.Join(dir, file), filepath.Join(fixtures, "llama3", "config.json"))
		refused(t, dir, Options{}, diag.BadInput, "has no config.json", words)
	}
	repo := filepath.Join(t.TempDir(), "models--acme--rocket")
	if err := os.Mkdir(repo, 0o755); err != nil {
		t.Fatal(err)
	}
	refused(t, repo, Options{}, diag.BadInput, "hf:acme/rocket")
}

func TestConfigThatIsNone(t *testing.T) {
	for name, c := range map[string]struct {
		text, word string
	}{
		"text":   {"not json", "not what Hugging Face writes"},
		"family": {`{"model_type": "mamba"}`, "mamba"},
		"empty":  {"", "not what Hugging Face writes"},
	} {
		dir := t.TempDir()
		path := filepath.Join(dir, "config.json")
		if err := os.WriteFile(path, []byte(c.text), 0o644); err != nil {
			t.Fatal(err)
		}
		t.Run(name, func(t *testing.T) { refused(t, dir, Options{}, diag.BadInput, c.word, path) })
	}
}

// hub makes a cache as huggingface_hub does: blobs, snapshots that link to them, and refs.
func hub(t *testing.T, cache string) (repo string) {
	t.Helper()
	repo = filepath.Join(cache, "models--acme--rocket")
	snapshot := filepath.Join(repo, "snapshots", "abc123")
	for _, dir := range []string{snapshot, filepath.Join(repo, "blobs"), filepath.Join(repo, "refs", "pr")} {
		if err := os.MkdirAll(dir, 0o755); err != nil {
			t.Fatal(err)
		}
	}
	for i, f := range []string{"config.json", "model.safetensors"} {
		blob := string(rune('a' + i))
		copyFile(t, filepath.Join(repo, "blobs", blob), filepath.Join(fixtures, "qwen3", f))
		if err := os.Symlink("../../blobs/"+blob, filepath.Join(snapshot, f)); err != nil {
			t.Fatal(err)
		}
	}
	for _, ref := range []string{"main", "pr/1"} {
		if err := os.WriteFile(filepath.Join(repo, "refs", ref), []byte("abc123"), 0o644); err != nil {
			t.Fatal(err)
		}
	}
	return repo
}

func TestOpenHub(t *testing.T) {
	for name, c := range map[string]struct {
		vars  map[string]string
		below string
	}{
		"HF_HUB_CACHE":   {map[string]string{"HF_HUB_CACHE": "/", "HF_HOME": "no"}, ""},
		"HF_HOME":        {map[string]string{"HF_HOME": "/", "XDG_CACHE_HOME": "no"}, "hub"},
		"XDG_CACHE_HOME": {map[string]string{"XDG_CACHE_HOME": "/", "HOME": "no"}, "huggingface/hub"},
		"HOME":           {map[string]string{"HOME": "/"}, ".cache/huggingface/hub"},
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			c.vars[name] = dir
			hub(t, filepath.Join(dir, c.below))
			for _, source := range []string{"hf:acme/rocket", "hf:acme/rocket@main", "hf:acme/rocket@abc123", "hf:acme/rocket@pr/1"} {
				m := mustOpen(t, source, env(c.vars))
				if m.Name != "acme/rocket" || !m.HasWeights() || m.Check() != nil {
					t.Errorf("%s is %+v", source, m)
				}
			}
		})
	}
	none := env(map[string]string{"HF_HUB_CACHE": t.TempDir()})
	refused(t, "hf:acme/rocket", none, diag.ModelMissing, "fix    hf download acme/rocket\n", `--include "*.safetensors"`)
	refused(t, "hf:acme/rocket@v2", none, diag.ModelMissing, "hf download acme/rocket --revision v2\n")
	refused(t, "hf:acme/rocket", env(nil), diag.ModelMissing, "HF_HUB_CACHE")
	for _, bad := range []string{"hf:", "hf:../../etc", "hf:a/b/c", "hf:a--b", "hf:-a", "hf:a/../b", "hf:a b", "hf:/etc"} {
		refused(t, bad, none, diag.BadUsage, "hf:ORGANIZATION/NAME")
	}
	for _, bad := range []string{"hf:a/b@../x", "hf:a/b@", "hf:a/b@-x", "hf:a/b@/etc"} {
		refused(t, bad, none, diag.BadUsage)
	}
}

func TestHubOfOtherRevisions(t *testing.T) {
	cache := t.TempDir()
	repo := hub(t, cache)
	o := env(map[string]string{"HF_HUB_CACHE": cache})
	for _, text := range []string{"../../../../etc", "", "fff", "a/b"} {
		if err := os.WriteFile(filepath.Join(repo, "refs", "main"), []byte(text), 0o644); err != nil {
			t.Fatal(err)
		}
		refused(t, "hf:acme/rocket", o, diag.ModelMissing, "hf:acme/rocket@abc123")
	}
	// A snapshot without its configuration names the download again.
	if err := os.Remove(filepath.Join(repo, "snapshots", "abc123", "config.json")); err != nil {
		t.Fatal(err)
	}
	refused(t, "hf:acme/rocket@abc123", o, diag.BadInput, "has no config.json", "hf download acme/rocket --revision abc123")
}

// Files that lead out of the folder, and files that are no files, are refused.
func TestFolderIsConfined(t *testing.T) {
	outside := filepath.Join(t.TempDir(), "secret.json")
	copyFile(t, outside, filepath.Join(fixtures, "llama3", "config.json"))
	for name, put := range map[string]func(path string) error{
		"link":     func(path string) error { return os.Symlink(outside, path) },
		"hardlink": func(path string) error { return os.Link(outside, path) },
		"folder":   func(path string) error { return os.Mkdir(path, 0o755) },
		"pipe":     func(path string) error { return unix.Mkfifo(path, 0o644) },
	} {
		t.Run(name, func(t *testing.T) {
			dir := t.TempDir()
			if err := put(filepath.Join(dir, "config.json")); err != nil {
				t.Skip(err)
			}
			m, err := Open(dir, Options{})
			if err == nil {
				t.Fatalf("%+v", m)
			}
			if e := diag.From(err); e.Code != diag.FileError && e.Code != diag.BadInput {
				t.Error(err)
			}
		})
	}
}

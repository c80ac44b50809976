package plugin

import (
	"context"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"sync"
	"testing"

	"github.com/deepwell/deepwell/diag"
)

// A busyContext does something the second time it is asked whether it has ended: hashing asks
// before every chunk, the last and empty one included, so that no file is done by then and the
// largest, which comes first, has most likely been read.
type busyContext struct {
	context.Context
	mu    sync.Mutex
	asked int
	do    func()
}

func (c *busyContext) Err() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.asked++; c.asked == 2 {
		c.do()
	}
	return c.Context.Err()
}

// withEngine makes a fixture with the engine installed.
func withEngine(t *testing.T) (x *fixture, plugin string) {
	t.Helper()
	x = newFixture(t, zipped(good()...))
	if _, err := x.installer().Install(t.Context(), "alpha"); err != nil {
		t.Fatal(err)
	}
	return x, filepath.Join(x.dir, "alpha", "alpha", "alpha.so")
}

// swaps are ways to put other bytes where the plugin is.
func swaps(t *testing.T, plugin string) map[string]func() {
	same := strings.Repeat("MACHINE CODE ", 1000)
	return map[string]func(){
		"in place": func() {
			f, err := os.OpenFile(plugin, os.O_WRONLY, 0)
			if err != nil {
				t.Error(err)
				return
			}
			defer f.Close()
			if _, err := f.WriteAt([]byte(same), 0); err != nil {
				t.Error(err)
			}
		},
		"by rename": func() {
			other := filepath.Join(t.TempDir(), "other")
			if err := os.WriteFile(other, []byte(same), 0o644); err != nil {
				t.Error(err)
			}
			if err := os.Rename(other, plugin); err != nil {
				t.Error(err)
			}
		},
	}
}

// A file that is changed while it is hashed is refused: its hash is of bytes that are gone
// (reliability A20).
func TestChangedWhileHashed(t *testing.T) {
	for _, how := range []string{"in place", "by rename"} {
		t.Run(how, func(t *testing.T) {
			x, plugin := withEngine(t)
			ctx := &busyContext{Context: t.Context(), do: swaps(t, plugin)[how]}
			_, err := x.table.open(ctx, x.dir, "alpha", false)
			if e := diag.From(err); e == nil || e.Code != diag.EngineUntrusted ||
				!strings.Contains(e.What, "alpha.so") {
				t.Errorf("a file that changed while it was hashed: %v", err)
			}
		})
	}
}

// What changes between hashing and loading is refused after the load.
func TestChangedBeforeLoaded(t *testing.T) {
	for name, change := range map[string]func(t *testing.T, plugin string){
		"in place":  func(t *testing.T, plugin string) { swaps(t, plugin)["in place"]() },
		"by rename": func(t *testing.T, plugin string) { swaps(t, plugin)["by rename"]() },
		"away and back": func(t *testing.T, plugin string) {
			if err := os.Rename(plugin, plugin+"x"); err != nil {
				t.Fatal(err)
			}
			if err := os.Rename(plugin+"x", plugin); err != nil {
				t.Fatal(err)
			}
		},
		"a library beside": func(t *testing.T, plugin string) {
			(&fixture{}).write(t, filepath.Join(filepath.Dir(plugin), "libcudart.so.13"), []byte("x"))
		},
	} {
		t.Run(name, func(t *testing.T) {
			x, plugin := withEngine(t)
			b, err := x.table.open(t.Context(), x.dir, "alpha", false)
			if err != nil {
				t.Fatal(err)
			}
			if err := b.Unchanged(); err != nil {
				t.Fatal(err)
			}
			change(t, plugin)
			if err := b.Unchanged(); diag.From(err) == nil || diag.From(err).Code != diag.EngineUntrusted {
				t.Errorf("%v", err)
			}
		})
	}
}

// A process knows which files it runs code of.
func TestMapped(t *testing.T) {
	self, err := os.Executable()
	if err != nil {
		t.Fatal(err)
	}
	if ok, err := mapped(self); !ok || err != nil {
		t.Errorf("the test itself: %t, %v", ok, err)
	}
	x, plugin := withEngine(t)
	if ok, err := mapped(plugin); ok || err != nil {
		t.Errorf("a file that is not loaded: %t, %v", ok, err)
	}
	b, err := x.table.open(t.Context(), x.dir, "alpha", false)
	if err != nil {
		t.Fatal(err)
	}
	if err := b.Loaded(); diag.From(err).Code != diag.EngineUntrusted {
		t.Errorf("nothing is loaded: %v", err)
	}
}

// Folders and files that others can write, or own, are refused by open and reported by list.
func TestExposed(t *testing.T) {
	mode := func(at string, mode os.FileMode) func(*testing.T, *fixture) {
		return func(t *testing.T, x *fixture) {
			if err := os.Chmod(filepath.Join(x.dir, at), mode); err != nil {
				t.Fatal(err)
			}
		}
	}
	give := func(at string) func(*testing.T, *fixture) {
		return func(t *testing.T, x *fixture) {
			if os.Geteuid() != 0 {
				t.Skip("only root can give files away")
			}
			if err := os.Chown(filepath.Join(x.dir, at), 54321, -1); err != nil {
				t.Fatal(err)
			}
		}
	}
	for _, row := range []struct {
		name, words string
		change      func(*testing.T, *fixture)
	}{
		{"engines, by all", "mode 0777", mode(".", 0o777)},
		{"engines, by the group", "mode 0775", mode(".", 0o775)},
		{"engine", "chmod -R go-w", mode("alpha", 0o757)},
		{"folder in it", "alpha/bin", mode("alpha/alpha/bin", 0o775)},
		{"plugin", "mode 0666", mode("alpha/alpha/alpha.so", 0o666)},
		{"manifest", "manifest.json", mode("alpha/manifest.json", 0o664)},
		{"engines of another user", "owner 54321", give(".")},
		{"engine of another user", "DEEPWELL_HOME", give("alpha")},
		{"plugin of another user", "alpha.so belongs to another user", give("alpha/alpha/alpha.so")},
		{"engines behind a link", "mode 0777", func(t *testing.T, x *fixture) {
			real := x.dir + "-real"
			if err := os.Rename(x.dir, real); err != nil {
				t.Fatal(err)
			}
			if err := os.Symlink(real, x.dir); err != nil {
				t.Fatal(err)
			}
			if err := os.Chmod(real, 0o777); err != nil {
				t.Fatal(err)
			}
		}},
	} {
		t.Run(row.name, func(t *testing.T) {
			x, _ := withEngine(t)
			row.change(t, x)
			_, err := x.table.open(t.Context(), x.dir, "alpha", false)
			e := diag.From(err)
			if e == nil || e.Code != diag.EngineExposed || !strings.Contains(e.Format(), row.words) {
				t.Errorf("want %s with %q, got %v", diag.EngineExposed, row.words, err)
			}
			if all, err := x.table.list(x.dir); err != nil || all[0].Exposed == "" {
				t.Errorf("list: %+v, %v", all, err)
			}
		})
	}
	// A folder further up is not asked for: a sticky /tmp and volumes of containers are open to all.
	x, _ := withEngine(t)
	if err := os.Chmod(filepath.Dir(x.dir), 0o777); err != nil {
		t.Fatal(err)
	}
	if _, err := x.table.open(t.Context(), x.dir, "alpha", false); err != nil {
		t.Error(fmt.Errorf("below a folder that all can write: %w", err))
	}
	// Installing mends what is in the engine's own folder.
	mode("alpha/alpha/alpha.so", 0o666)(t, x)
	if _, err := x.installer().Install(t.Context(), "alpha"); err != nil {
		t.Error(err)
	}
	if _, err := x.table.open(t.Context(), x.dir, "alpha", false); err != nil {
		t.Error(err)
	}
}

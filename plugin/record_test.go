package plugin

import (
	"errors"
	"io/fs"
	"os"
	"path/filepath"
	"testing"
	"time"

	"github.com/deepwell/deepwell/diag"
)

// recorded makes an engine whose plugin was changed, and a record that knows the changed file: what
// Open takes from the record can be distinguished from what it hashes.
func recorded(t *testing.T) (x *fixture, plugin, kept string) {
	t.Helper()
	x, plugin = withEngine(t)
	swaps(t, plugin)["in place"]()
	folder, e := filepath.Join(x.dir, "alpha"), &x.table.engines[0]
	m, err := readManifest(folder)
	if err != nil {
		t.Fatal(err)
	}
	var seals []seal
	for _, f := range m.Files {
		path := filepath.Join(folder, filepath.FromSlash(f.Path))
		info, err := os.Lstat(path)
		if err != nil {
			t.Fatal(err)
		}
		s, err := newSeal(path, info)
		if err != nil {
			t.Fatal(err)
		}
		seals = append(seals, s)
	}
	tree, kept := e.trees[x.table.host], recordPath(x.dir, "alpha")
	if r := remember(tree, folder, seals, time.Now()); len(r.Files) > 0 {
		t.Errorf("files that were written just now are remembered: %v", r.Files)
	}
	remember(tree, folder, seals, time.Now().Add(time.Hour)).write(kept)
	if _, err := x.table.open(t.Context(), x.dir, "alpha", false); err != nil {
		t.Fatalf("a file that the record knows was hashed: %v", err)
	}
	return x, plugin, kept
}

// A record is believed for the very files that it is of, as long as nobody else could write it.
func TestRecordsAreHeldToTheFiles(t *testing.T) {
	for name, spoil := range map[string]func(plugin, kept string) error{
		"the file is touched": func(plugin, _ string) error {
			info, err := os.Stat(plugin)
			if err != nil {
				return err
			}
			return os.Chtimes(plugin, info.ModTime(), info.ModTime()) // the kernel sets ctime
		},
		"the file is another of the same bytes": func(plugin, _ string) error {
			b, err := os.ReadFile(plugin)
			if err != nil {
				return err
			}
			return errors.Join(os.Remove(plugin), os.WriteFile(plugin, b, 0o644))
		},
		"others may write the record": func(_, kept string) error { return os.Chmod(kept, 0o666) },
		"the record is a link": func(_, kept string) error {
			return errors.Join(os.Rename(kept, kept+"2"), os.Symlink(kept+"2", kept))
		},
		"the record is truncated": func(_, kept string) error { return os.Truncate(kept, 40) },
		"the record is gone":      func(_, kept string) error { return os.Remove(kept) },
		"the record is of another tree": func(_, kept string) error {
			r := record{Version: recordVersion, Tree: "other"}
			r.write(kept)
			return nil
		},
	} {
		t.Run(name, func(t *testing.T) {
			x, plugin, kept := recorded(t)
			if err := spoil(plugin, kept); err != nil {
				t.Fatal(err)
			}
			_, err := x.table.open(t.Context(), x.dir, "alpha", false)
			if !errors.Is(err, diag.EngineUntrusted) {
				t.Errorf("opened: %v", err)
			}
		})
	}
}

// Verify, as doctor calls it, believes no record; an engine that is removed leaves none.
func TestVerifyHashesAll(t *testing.T) {
	x, _, kept := recorded(t)
	if _, err := x.table.open(t.Context(), x.dir, "alpha", true); !errors.Is(err,
		diag.EngineUntrusted) {
		t.Errorf("opened: %v", err)
	}
	if err := x.table.remove(x.dir, "alpha"); err != nil {
		t.Fatal(err)
	}
	if _, err := os.Lstat(kept); !errors.Is(err, fs.ErrNotExist) {
		t.Errorf("the record is there: %v", err)
	}
}

// What was hashed is remembered once it is settled, and not before.
func TestHashedFilesAreRemembered(t *testing.T) {
	x, _ := withEngine(t)
	m, err := readManifest(filepath.Join(x.dir, "alpha"))
	if err != nil {
		t.Fatal(err)
	}
	open := func(want int) {
		t.Helper()
		b, err := x.table.open(t.Context(), x.dir, "alpha", false)
		if err != nil || b.Unchanged() != nil {
			t.Fatalf("opened: %v, %v", err, b.Unchanged())
		}
		if r := readRecord(recordPath(x.dir, "alpha"), b.Digest); len(r.Files) != want {
			t.Errorf("%d files of %d are remembered, not %d", len(r.Files), len(m.Files), want)
		}
	}
	x.ahead = -time.Minute // however long installing has taken
	open(0)
	x.ahead = settled + 100*time.Millisecond
	open(len(m.Files))
	open(len(m.Files))
}

package cas

import (
	"bytes"
	"cmp"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"io/fs"
	"os"
	"path/filepath"
	"regexp"
	"time"

	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/lists"
)

// ErrDamaged says that an entry was there but its contents are not what was stored. It is also
// fs.ErrNotExist: the entry is gone now.
var ErrDamaged = fmt.Errorf("cas: the entry is damaged: %w", fs.ErrNotExist)

// A Store is a folder of entries. The zero Store holds nothing and takes nothing.
type Store struct{ dir string }

// Open names the folder; it is made when the first entry is stored.
func Open(dir string) Store { return Store{dir} }

// Key hashes the parts that an entry depends on; the boundaries between parts count.
func Key(parts ...[]byte) string {
	h := sha256.New()
	for _, p := range parts {
		fmt.Fprintf(h, "%d:", len(p))
		h.Write(p)
	}
	return hex.EncodeToString(h.Sum(nil))
}

func (s Store) path(key string) string { return filepath.Join(s.dir, key[:2], key) }

// Get reads an entry; a missing one is fs.ErrNotExist.
func (s Store) Get(key string) ([]byte, error) {
	if s.dir == "" {
		return nil, fs.ErrNotExist
	}
	b, err := os.ReadFile(s.path(key))
	if err != nil {
		return nil, err
	}
	if len(b) >= sha256.Size {
		sum := sha256.Sum256(b[sha256.Size:])
		if bytes.Equal(sum[:], b[:sha256.Size]) {
			return b[sha256.Size:], nil
		}
	}
	// A store that we may not write to keeps its damaged file; the answer is the same.
	_ = os.Remove(s.path(key))
	return nil, ErrDamaged
}

// Put stores an entry.
func (s Store) Put(key string, data []byte) error {
	if s.dir == "" {
		return nil
	}
	if err := os.MkdirAll(filepath.Dir(s.path(key)), 0o755); err != nil {
		return err
	}
	sum := sha256.Sum256(data)
	return atomicfile.WriteFunc(s.path(key), 0o644, func(w io.Writer) error {
		if _, err := w.Write(sum[:]); err != nil {
			return err
		}
		_, err := w.Write(data)
		return err
	})
}

// Trim removes the entries written longest ago until at most limit bytes are left. It counts and
// removes only plain files with the names of entries, and follows no link: whatever else lies in
// the folder is not the store's.
func (s Store) Trim(limit int64) error {
	if s.dir == "" {
		return nil
	}
	root, err := os.OpenRoot(s.dir)
	if err != nil {
		return ignoreMissing(err)
	}
	defer root.Close()
	all, err := entries(root)
	if err != nil {
		return err
	}
	total := lists.Sum(all, func(e entry) int64 { return e.size })
	lists.Sort(all, func(a, b entry) int {
		return cmp.Or(a.at.Compare(b.at), cmp.Compare(a.path, b.path))
	})
	for _, e := range all {
		if total <= limit {
			break
		}
		if err := ignoreMissing(root.Remove(e.path)); err != nil {
			return err
		}
		total -= e.size
	}
	return nil
}

// An entry is a file of the store.
type entry struct {
	path string
	size int64
	at   time.Time
}

// keyName is every name that an entry can have; its folder has the first two letters.
var keyName = regexp.MustCompile(fmt.Sprintf("^[0-9a-f]{%d}$", 2*sha256.Size))

func entries(root *os.Root) (all []entry, err error) {
	folders, err := fs.ReadDir(root.FS(), ".")
	if err != nil {
		return nil, err
	}
	for _, d := range folders {
		if !d.IsDir() || len(d.Name()) != 2 { // IsDir of a link is false
			continue
		}
		files, err := fs.ReadDir(root.FS(), d.Name())
		if ignoreMissing(err) != nil {
			return nil, err
		}
		for _, f := range files {
			if !f.Type().IsRegular() || f.Name()[:min(2, len(f.Name()))] != d.Name() ||
				!keyName.MatchString(f.Name()) {
				continue
			}
			info, err := f.Info()
			if errors.Is(err, fs.ErrNotExist) {
				continue // another process was faster
			}
			if err != nil {
				return nil, err
			}
			all = append(all, entry{filepath.Join(d.Name(), f.Name()), info.Size(), info.ModTime()})
		}
	}
	return all, nil
}

// ignoreMissing forgives what another process removed first.
func ignoreMissing(err error) error {
	if errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	return err
}

package plugin

import (
	"encoding/json"
	"os"
	"path/filepath"
	"syscall"
	"time"

	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/plainfile"
)

// A record keeps the seals of files whose bytes were hashed, so that the next process need not hash
// 1.7 GB again: 5 s on a processor without SHA instructions. It lies beside the engine's folder,
// since a new name inside would break the seals of that folder which other processes hold. Whoever
// can write it can write the engines: both have to pass exposed.
type record struct {
	Version int              `json:"version"`
	Tree    string           `json:"tree"`  // digest of the whole tree
	Files   map[string]stamp `json:"files"` // by slash path
}

// A stamp is a seal in a record, without the number of the device: hosts that share a folder by NFS
// number it each in their own way.
type stamp struct {
	Ino   uint64 `json:"ino"`
	Size  int64  `json:"size"`
	Mtime int64  `json:"mtime"` // nanoseconds since 1970, as ctime
	Ctime int64  `json:"ctime"`
}

const (
	recordVersion = 1
	maxRecord     = 16 << 20
	// settled is how old a change of a file has to be for its seal to tell it from the next change:
	// kernels count file times in steps of up to 10 ms, some file systems in seconds.
	settled = 2 * time.Second
)

func recordPath(dir, engine string) string { return filepath.Join(dir, "."+engine+".verified") }

func (s seal) stamp() stamp {
	return stamp{s.ino, s.size, nanoseconds(s.mtime), nanoseconds(s.ctime)}
}

func nanoseconds(t syscall.Timespec) int64 { return t.Sec*1e9 + t.Nsec }

// readRecord reads the record of a tree. One that is missing, damaged, of another tree or open to
// others is empty: everything is hashed.
func readRecord(path, tree string) record {
	none := record{Version: recordVersion, Tree: tree}
	f, err := plainfile.Open(path, os.O_RDONLY, 0)
	if err != nil {
		return none
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil || info.Size() > maxRecord || exposed(path, info) != nil {
		return none
	}
	var r record
	if err := json.NewDecoder(f).Decode(&r); err != nil || r.Version != recordVersion ||
		r.Tree != tree {
		return none
	}
	return r
}

// has gives the seal of the file at path, if it is the one that was hashed under that name.
func (r record) has(name, path string) (seal, bool) {
	want, known := r.Files[name]
	if !known {
		return seal{}, false
	}
	info, err := os.Lstat(path)
	if err != nil {
		return seal{}, false
	}
	s, err := newSeal(path, info)
	return s, err == nil && s.stamp() == want
}

// write keeps the record, where the folder can be written: an engine that root has installed for
// others is hashed by each of their processes until root has used it.
func (r record) write(path string) {
	text, err := json.Marshal(r)
	if err == nil {
		_ = atomicfile.Write(path, append(text, '\n'), 0o644)
	}
}

// remember gives the record of files that have just been hashed, of those that had not changed
// shortly before.
func remember(tree, folder string, seals []seal, began time.Time) record {
	r := record{Version: recordVersion, Tree: tree, Files: map[string]stamp{}}
	for _, s := range seals {
		rel, err := filepath.Rel(folder, s.path)
		if err == nil && nanoseconds(s.ctime) < began.Add(-settled).UnixNano() {
			r.Files[filepath.ToSlash(rel)] = s.stamp()
		}
	}
	return r
}

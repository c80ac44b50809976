package plugin

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/atomicfile"
	"github.com/deepwell/deepwell/internal/lists"
)

// An Installer brings engines to disk.
type Installer struct {
	Dir    string     // where engines live, see DefaultDir
	From   []string   // wheels, or folders of wheels; if any is given, pip is not asked
	Events event.Sink // progress; may be nil
	Pip    []string   // command that runs pip; found on PATH if empty

	catalogue *catalogue // nil means the built-in table; tests have their own
}

// Install makes sure that an engine is in Dir and intact. An engine that is already there costs a
// verification and a note; one that was changed is installed again. If another process is
// installing the same engine, Install waits for it until ctx ends (DW2006).
//
// A kill at any moment leaves either the whole engine or none, and what else it leaves is removed
// by the next Install.
func (in *Installer) Install(ctx context.Context, name string) (*Bundle, error) {
	c := in.catalogue
	if c == nil {
		c = builtin()
	}
	e, err := c.find(name)
	if err != nil {
		return nil, err
	}
	dir, err := filepath.Abs(in.Dir)
	if err != nil {
		return nil, cannotWrite(err)
	}
	if err := os.MkdirAll(dir, 0o755); err != nil {
		return nil, cannotWrite(err).At("%s", dir)
	}
	if err := checkRoot(dir); err != nil {
		return nil, err
	}
	held, err := acquire(ctx, dir, name, func(pid int) {
		in.note("waiting: %s", busy(name, pid).What)
	})
	if err != nil {
		return nil, err
	}
	defer held.release()
	if err := sweep(dir, name); err != nil {
		return nil, err
	}
	seals, err := c.verify(ctx, filepath.Join(dir, name), e, true)
	switch {
	case err == nil:
		in.note("engine %q is already installed", name)
		return c.bundle(dir, e, seals), nil
	case errors.Is(err, diag.EngineUntrusted),
		errors.Is(err, diag.EngineExposed):
		in.emit(event.Warning{Code: string(diag.From(err).Code),
			Text: diag.From(err).What + "; installing it again"})
	case ctx.Err() != nil:
		return nil, err
	}
	if err := in.install(ctx, c, e, dir); err != nil {
		return nil, err
	}
	// What was just written is hashed as at every start, so that what is loaded can be held to it.
	if seals, err = c.verify(ctx, filepath.Join(dir, name), e, true); err != nil {
		return nil, err
	}
	return c.bundle(dir, e, seals), nil
}

// install fetches, unpacks and puts into place. The caller holds the lock.
func (in *Installer) install(ctx context.Context, c *catalogue, e *engine, dir string) error {
	temp, err := os.MkdirTemp(dir, leftovers(e.name))
	if err != nil {
		return cannotWrite(err).At("%s", dir)
	}
	defer func() { _ = os.RemoveAll(temp) }() // the next sweep takes what is left
	tree := filepath.Join(temp, "tree")
	if err := os.Mkdir(tree, 0o755); err != nil {
		return cannotWrite(err).At("%s", tree)
	}
	files, err := in.fill(ctx, c, e, temp, tree)
	if err != nil {
		return err
	}
	lists.Sort(files, byPath)
	digest := treeDigest(files)
	if want := e.trees[c.host]; digest != want {
		return diag.New(diag.EngineDigest,
			"the files of engine %q have another SHA-256 than the pinned one", e.name).
			Because("want %.12s, got %.12s", want, digest).
			Try("please report this: the wheels were right")
	}
	m := manifest{Version: manifestVersion, Engine: e.name, Packages: e.packages(), Files: files}
	text, err := json.MarshalIndent(m, "", "  ")
	if err != nil {
		return cannotWrite(err)
	}
	text = append(text, '\n')
	if err := atomicfile.Write(filepath.Join(tree, manifestName), text, 0o644); err != nil {
		return cannotWrite(err)
	}
	if err := place(tree, dir, e.name); err != nil {
		return cannotWrite(err)
	}
	in.emit(event.Installed{Engine: e.name, Bytes: m.bytes(), Digest: digest})
	return nil
}

// fill brings the wheels one by one and unpacks each into tree.
func (in *Installer) fill(
	ctx context.Context, c *catalogue, e *engine, temp, tree string,
) ([]file, error) {
	root, err := os.OpenRoot(tree)
	if err != nil {
		return nil, cannotWrite(err)
	}
	defer root.Close()
	source, err := in.source(ctx, temp)
	if err != nil {
		return nil, err
	}
	var files []file
	for _, w := range e.wheels {
		p := w.Pins[c.host]
		path, done, err := source(ctx, w, p)
		if err != nil {
			return nil, err
		}
		got, err := in.unpackWheel(ctx, path, root, w, p)
		done()
		if err != nil {
			return nil, err
		}
		files = append(files, got...)
	}
	extra := c.generated(e)
	for _, name := range slices.Sorted(maps.Keys(extra)) {
		digest, size, err := writeFile(ctx, root, name, bytes.NewReader(extra[name]))
		if err != nil {
			return nil, err
		}
		files = append(files, file{Path: name, SHA256: digest, Bytes: size})
	}
	return files, nil
}

// unpackWheel unpacks one wheel whose digest has been checked.
func (in *Installer) unpackWheel(
	ctx context.Context, path string, root *os.Root, w wheel, p pin,
) ([]file, error) {
	f, err := os.Open(path)
	if err != nil {
		return nil, cannotRead(path, err)
	}
	defer f.Close()
	info, err := f.Stat()
	if err != nil {
		return nil, cannotRead(path, err)
	}
	return unpack(ctx, f, info.Size(), root, selection{
		wheel: filepath.Base(path), keep: w.Keep, maybe: keepAlways, limit: p.Unpacked,
		progress: func(done, total int64) {
			in.emit(event.Progress{Task: "unpack " + w.spec(), Done: done, Total: total, Unit: "B"})
		},
	})
}

// leftovers is the pattern of an engine's temporary folders, for MkdirTemp and for Glob.
func leftovers(name string) string { return "." + name + ".tmp-*" }

// sweep removes what killed installations left behind. The caller holds the lock, so nobody is
// using it.
func sweep(dir, name string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return cannotWrite(err).At("%s", dir)
	}
	for _, entry := range entries {
		if match, _ := filepath.Match(leftovers(name), entry.Name()); match {
			if err := os.RemoveAll(filepath.Join(dir, entry.Name())); err != nil {
				return cannotWrite(err)
			}
		}
	}
	return nil
}

// place moves a whole tree to its final name. An older tree of that name steps aside first.
func place(tree, dir, name string) error {
	if err := syncTree(tree); err != nil {
		return err
	}
	if err := retire(dir, name); err != nil {
		return err
	}
	if err := os.Rename(tree, filepath.Join(dir, name)); err != nil {
		return err
	}
	return syncPath(dir)
}

// retire renames an installed engine to a leftover, if there is one: from that moment it is not
// installed, whatever becomes of the removal.
func retire(dir, name string) error {
	old := filepath.Join(dir, name)
	if _, err := os.Lstat(old); errors.Is(err, os.ErrNotExist) {
		return nil
	}
	aside, err := os.MkdirTemp(dir, leftovers(name))
	if err != nil {
		return err
	}
	if err := os.Rename(old, filepath.Join(aside, "old")); err != nil {
		return err
	}
	return os.RemoveAll(aside)
}

// syncTree makes the files and the names in a tree durable, so that a power cut after the rename
// finds them. It is done at the end, when the kernel has written most of them already.
func syncTree(tree string) error {
	return filepath.WalkDir(tree, func(path string, _ os.DirEntry, err error) error {
		if err != nil {
			return err
		}
		return syncPath(path)
	})
}

func syncPath(path string) error {
	f, err := os.Open(path)
	if err != nil {
		return err
	}
	defer f.Close()
	return f.Sync()
}

func (in *Installer) emit(e event.Event) {
	if in.Events != nil {
		in.Events.Emit(e)
	}
}

func (in *Installer) note(format string, args ...any) {
	in.emit(event.Note{Text: fmt.Sprintf(format, args...)})
}

package ckpt

import (
	"cmp"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"slices"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

// A draft may have writers in other processes, on hosts that see the same folder. The process that
// begins it gives it a mark, by which the others join it; what each leaves there shows the first
// that both see the same folder and may write to it. Each writes a part file of its own and beside
// it a share, which says what is in the part; the first gets the hash of every share, reads them
// and commits.
//
//	leader:  Begin (Options.Mark) ┐        ┌ Joined ┐                     ┌ Add each ─ Commit
//	                              ├ (name) ┤        ├ Share in every one ─┤ (gets the hashes)
//	others:                       └ Join ──┘        ┘                     └ wait for the leader
//
// Who waits for whom is up to the caller: nothing here sends messages.

// Files of a draft with several writers: a mark that a writer joined, what its part contains, and
// the part itself.
func joinedName(writer int) string { return fmt.Sprintf("joined-%05d", writer) }
func shareName(writer int) string  { return fmt.Sprintf("share-%05d.json", writer) }
func partFile(writer int) string   { return fmt.Sprintf("part-%05d.safetensors", writer) }

// tempName is the folder of a draft. With a mark it is one that no other draft ever has, so that a
// writer that was suspended while its run ended does not write into the next one's.
func tempName(step int64, mark string) string {
	if mark != "" {
		mark = "." + mark
	}
	return tempPrefix + stepName(step) + mark
}

// Join gives a draft that another process has begun, for a writer in this one. It holds no lock,
// and neither commits nor removes anything. If the folder is not the one that the other process
// sees, or may not be written, Join fails.
func Join(dir string, step int64, mark string, writer int, o Options) (*Draft, error) {
	o.Events = cmp.Or(o.Events, event.Discard)
	d := &Draft{dir: dir, temp: filepath.Join(dir, tempName(step, mark)), step: step, opts: o,
		tensors: map[string]*Stored{}}
	if err := d.put(joinedName(writer), nil); err != nil {
		return nil, unwritten(err, dir, step, o.Needed)
	}
	return d, nil
}

// Joined tells whether a writer in another process has joined the draft, in this folder.
func (d *Draft) Joined(writer int) bool {
	_, err := os.Lstat(d.in(joinedName(writer)))
	return err == nil
}

// in is a path inside the draft's folder.
func (d *Draft) in(name string) string { return filepath.Join(d.temp, name) }

// Share writes slices of src as the part of one writer, and what the process that commits has to
// know of it, and gives the hash of the latter: "" if there is nothing. nil means every tensor of
// src, whole. When it returns, the part survives a power cut of this host.
func (d *Draft) Share(ctx context.Context, writer int, src Source, list []Slice) (sum string,
	err error) {
	if len(src.Tensors()) == 0 || list != nil && len(list) == 0 {
		return "", nil
	}
	if err := d.Write(ctx, writer, src, list); err != nil {
		return "", err
	}
	m, err := d.manifest(Meta{})
	if err != nil {
		return "", err
	}
	m.partial = true
	text, err := m.Encode()
	if err != nil {
		return "", err
	}
	if err := d.put(shareName(writer), text); err != nil {
		return "", unwritten(err, d.dir, d.step, max(d.opts.Needed, m.Bytes()))
	}
	return hashOf(text), nil
}

// hashOf is the SHA-256 of a share's text, in hex.
func hashOf(text []byte) string {
	sum := sha256.Sum256(text)
	return hex.EncodeToString(sum[:])
}

// put writes a small file into the draft and makes it durable.
func (d *Draft) put(name string, text []byte) error {
	disk := d.opts.disk
	f, err := disk.create(d.in(name))
	if err != nil {
		return err
	}
	if err := disk.writeAt(f, text, 0); err != nil {
		f.Close()
		return err
	}
	if err := disk.sync(f); err != nil {
		return err
	}
	return disk.syncDir(d.temp)
}

// Add takes over what a writer in another process has shared, whose hash is sum.
func (d *Draft) Add(writer int, sum string) error {
	if sum == "" {
		return nil
	}
	m, err := d.readShare(writer, sum)
	if err != nil {
		return unwritten(err, d.dir, d.step, d.opts.Needed)
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	d.files = append(d.files, m.Files...)
	for _, t := range m.Tensors {
		if err := d.know(t.Tensor); err != nil {
			return err
		}
		s := d.tensors[t.Name]
		s.Parts = append(s.Parts, t.Parts...)
	}
	return nil
}

// readShare reads what a writer shared and holds it, and the size of its part, to what it said.
func (d *Draft) readShare(writer int, sum string) (*Manifest, error) {
	root, err := os.OpenRoot(d.temp)
	if err != nil {
		return nil, err
	}
	defer root.Close()
	f, size, err := openPlain(root, shareName(writer))
	if err != nil {
		return nil, err
	}
	defer f.Close()
	text, err := io.ReadAll(io.LimitReader(f, min(size, maxManifest)))
	if err != nil {
		return nil, err
	}
	if hashOf(text) != sum {
		return nil, fmt.Errorf("%s is not what its writer wrote", f.Name())
	}
	m, err := parseManifest(text, true)
	if err != nil {
		return nil, err
	}
	if m.Step != d.step || len(m.Files) != 1 || m.Files[0].Name != partFile(writer) {
		return nil, fmt.Errorf("%s is of step %d and has %d files", f.Name(), m.Step, len(m.Files))
	}
	part, bytes, err := openPlain(root, partFile(writer))
	if err != nil {
		return nil, err
	}
	if bytes != m.Files[0].Bytes {
		err = fmt.Errorf("%s has %d bytes, its writer wrote %d", part.Name(), bytes, m.Files[0].Bytes)
	}
	return m, errors.Join(err, part.Close())
}

// Whole is an error if the draft lacks a tensor of a list: nobody who commits a part of a state
// would find out before the run is resumed.
func (d *Draft) Whole(list []Tensor) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	for _, t := range list {
		if d.tensors[t.Name] == nil {
			return diag.New(diag.CheckpointWrite, "no process has written %s of step %d", t.Name, d.step).
				At("%s", d.dir).
				Try("start the run again: it goes on from the newest checkpoint")
		}
	}
	return nil
}

// bare removes what only the writers need, before the draft becomes a checkpoint.
func (d *Draft) bare() error {
	if d.opts.Mark == "" {
		return nil
	}
	list, err := os.ReadDir(d.temp)
	if err != nil {
		return err
	}
	for _, e := range list {
		written := slices.ContainsFunc(d.files, func(f File) bool { return f.Name == e.Name() })
		if written {
			continue
		}
		if err := d.opts.disk.removeAll(d.in(e.Name())); err != nil {
			return err
		}
	}
	return nil
}

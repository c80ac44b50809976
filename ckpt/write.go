package ckpt

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/flock"
	"github.com/deepwell/deepwell/internal/human"
	"github.com/deepwell/deepwell/internal/lists"
)

// Options say how checkpoints are written.
type Options struct {
	// Keep is how many checkpoints stay when a new one is whole; 0 keeps all.
	Keep int
	// Workers is how many slices are written at once; 0 means as many as there are processors.
	Workers int
	// Events hears progress and warnings.
	Events event.Sink
	// Mark is a word that no other draft has, for one that other processes write to as well ([Join]).
	Mark string
	// Needed is the bytes of the whole step, where they are known beforehand, for messages.
	Needed int64

	disk  disk
	chunk int64         // buffer of a worker, in tests
	wait  time.Duration // for the folder's lock, in tests; 0 is lockWait
}

// Save writes one checkpoint of everything that src holds. When it returns, the step survives a
// power cut; if it fails, every checkpoint that was whole before is still there. If the step is
// there already, with the same tensors at the same place in the data, it is saved; with others it
// is another run's, and Save fails (CheckpointExists).
func Save(ctx context.Context, dir string, step int64, meta Meta, src Source, o Options) error {
	for _, t := range src.Tensors() {
		if checkTensor(t) == nil {
			o.Needed += t.Bytes()
		}
	}
	d, err := Begin(ctx, dir, step, o)
	if err != nil {
		if diag.From(err).Code == diag.CheckpointExists {
			same, failed := meta.Saved(ctx, dir, step, src, nil)
			if same {
				return nil
			}
			err = cmp.Or(failed, err)
		}
		return err
	}
	defer d.Abort()
	if err := d.Write(ctx, 0, src, nil); err != nil {
		return err
	}
	return d.Commit(ctx, meta)
}

// Saved tells whether the checkpoint of a step is there and is what would be written in its place.
// The error comes from reading one of the two.
//
// A process that has some slices of the state compares those in only; nil are all.
func (meta Meta) Saved(ctx context.Context, dir string, step int64, src Source,
	only []Slice) (bool, error) {
	c, err := Open(filepath.Join(dir, stepName(step)))
	if err != nil {
		return false, nil // what cannot be opened is another
	}
	defer func() { _ = c.Close() }() // it was only read
	if c.Seed != meta.Seed || !maps.Equal(c.Data, meta.Data) {
		return false, nil
	}
	if only != nil {
		return c.holds(ctx, src, only)
	}
	differ, err := Diff(ctx, c, src)
	return err == nil && len(differ) == 0, err
}

// holds reports whether the checkpoint has the tensors of a source, and the same bytes in slices.
func (c *Checkpoint) holds(ctx context.Context, src Source, list []Slice) (bool, error) {
	types := map[string]Tensor{}
	for _, one := range c.Tensors() {
		types[one.Name] = one
	}
	all := src.Tensors()
	for _, one := range all {
		have, ok := types[one.Name]
		if !ok || have.DType != one.DType || !slices.Equal(have.Shape, one.Shape) {
			return false, nil
		}
	}
	if len(all) != len(types) {
		return false, nil
	}
	for _, s := range list {
		if err := ctx.Err(); err != nil {
			return false, err
		}
		bits := int64(types[s.Name].DType.Bits())
		for _, size := range s.Box.Size {
			bits *= size
		}
		ours, theirs := make([]byte, (bits+7)/8), make([]byte, (bits+7)/8)
		err := src.ReadSlice(s.Name, s.Box, ours)
		if err == nil {
			err = c.ReadSlice(s.Name, s.Box, theirs)
		}
		if err != nil || !bytes.Equal(ours, theirs) {
			return false, err
		}
	}
	return true, nil
}

// A Draft is a checkpoint under way: each of any number of writers adds its slices, and one of
// them commits. It holds the folder's lock until Commit or Abort. Writers are goroutines of one
// process, or processes that see the same folder ([Join]).
type Draft struct {
	dir, temp string
	step      int64
	opts      Options
	lock      *flock.Lock

	mu      sync.Mutex
	files   []File
	tensors map[string]*Stored
}

// Begin starts a checkpoint in dir, which is made if it is not there, and removes what a killed
// writer left. A step that is there and whole is not written again; a damaged one is replaced.
func Begin(ctx context.Context, dir string, step int64, o Options) (_ *Draft, err error) {
	o.Events = cmp.Or(o.Events, event.Discard)
	if step < 0 || step > maxStep {
		return nil, diag.New(diag.BadUsage, "step %d is not between 0 and %d", step, int64(maxStep))
	}
	fail := func(err error) error { return unwritten(err, dir, step, o.Needed) }
	if err := makeFolder(o.disk, dir); err != nil {
		return nil, fail(err)
	}
	l, err := acquire(ctx, dir, o)
	if err != nil {
		return nil, fail(err)
	}
	defer func() {
		if err != nil {
			l.Release()
		}
	}()
	if err := clean(o.disk, dir); err != nil {
		return nil, fail(err)
	}
	if err := vacate(ctx, dir, step, o); err != nil {
		return nil, fail(err)
	}
	temp := filepath.Join(dir, tempName(step, o.Mark))
	if err := o.disk.mkdir(temp); err != nil {
		return nil, fail(err)
	}
	return &Draft{dir: dir, temp: temp, step: step, opts: o, lock: l,
		tensors: map[string]*Stored{}}, nil
}

// makeFolder makes dir and whatever is missing above it, and makes the names durable.
func makeFolder(d disk, dir string) error {
	if _, err := os.Stat(dir); !errors.Is(err, fs.ErrNotExist) {
		return err
	}
	parent := filepath.Dir(dir)
	if parent != dir {
		if err := makeFolder(d, parent); err != nil {
			return err
		}
	}
	if err := d.mkdir(dir); err != nil && !errors.Is(err, fs.ErrExist) {
		return err
	}
	return d.syncDir(parent)
}

// vacate makes room for a step: nothing is there, or what is there is damaged and goes.
func vacate(ctx context.Context, dir string, step int64, o Options) error {
	path := filepath.Join(dir, stepName(step))
	if _, err := os.Lstat(path); errors.Is(err, fs.ErrNotExist) {
		return nil
	}
	why := verifyAt(ctx, path)
	if why == nil {
		return diag.New(diag.CheckpointExists, "step %d of another run is there already", step).
			At("%s", path).Try("give this run a folder of its own")
	}
	if e := diag.From(why); e.Code != diag.CheckpointDamaged {
		return e
	}
	o.Events.Emit(event.Warning{Code: string(diag.CheckpointDamaged),
		Text: fmt.Sprintf("step %d is written again: %s", step, diag.From(why).What)})
	return discard(o.disk, dir, step)
}

// discard takes a step out of sight in one rename and then removes it, so that a kill in between
// leaves nothing that looks like a checkpoint.
func discard(d disk, dir string, step int64) error {
	name := stepName(step)
	old := filepath.Join(dir, oldPrefix+name)
	if err := d.rename(filepath.Join(dir, name), old); err != nil {
		return err
	}
	if err := d.syncDir(dir); err != nil {
		return err
	}
	return d.removeAll(old)
}

// Abort removes a draft that was not committed.
func (d *Draft) Abort() {
	if d.lock == nil {
		return
	}
	// A folder that cannot be removed now is removed by the next writer.
	_ = d.opts.disk.removeAll(d.temp)
	d.lock.Release()
	d.lock = nil
}

// Write adds the slices of one writer as a part file of its own; nil means every tensor of src,
// whole. Writers are numbered from 0, each number is used once, and several may write at once.
func (d *Draft) Write(ctx context.Context, writer int, src Source, list []Slice) error {
	name := partFile(writer)
	if !fileName.MatchString(name) {
		return diag.New(diag.BadUsage, "%d is not the number of a writer", writer)
	}
	parts, err := d.plan(name, src.Tensors(), list)
	if err != nil {
		return err
	}
	head, err := header(parts)
	if err != nil {
		return err
	}
	file := File{Name: name, Header: int64(len(head)), Bytes: int64(len(head)), SHA256: hashOf(head)}
	for i := range parts {
		parts[i].part.Offset = file.Bytes
		file.Bytes += parts[i].part.Bytes
	}
	if err := d.writeFile(ctx, file, head, parts, src); err != nil {
		return unwritten(err, d.dir, d.step, max(d.opts.Needed, file.Bytes))
	}
	return d.record(file, src.Tensors(), parts)
}

// record adds what one writer wrote.
func (d *Draft) record(file File, tensors []Tensor, parts []planned) error {
	d.mu.Lock()
	defer d.mu.Unlock()
	d.files = append(d.files, file)
	for _, t := range tensors {
		if err := d.know(t); err != nil {
			return err
		}
	}
	for _, p := range parts {
		s := d.tensors[p.tensor.Name]
		s.Parts = append(s.Parts, p.part)
	}
	return nil
}

// know notes a tensor of which a writer has parts.
func (d *Draft) know(t Tensor) error {
	known := d.tensors[t.Name]
	if known == nil {
		d.tensors[t.Name] = &Stored{Tensor: Tensor{t.Name, t.DType, slices.Clone(t.Shape)}}
	} else if !known.same(t) {
		return diag.New(diag.CheckpointTensor, "one writer has %s as %v, another as %v",
			human.Quote(t.Name), known, t)
	}
	return nil
}

// manifest puts together what all writers wrote.
func (d *Draft) manifest(meta Meta) (*Manifest, error) {
	meta, err := meta.clone()
	if err != nil {
		return nil, err
	}
	d.mu.Lock()
	defer d.mu.Unlock()
	m := &Manifest{Version: version, Step: d.step, Meta: meta, Files: slices.Clone(d.files)}
	lists.Sort(m.Files, func(a, b File) int { return strings.Compare(a.Name, b.Name) })
	for _, name := range slices.Sorted(maps.Keys(d.tensors)) {
		t := *d.tensors[name]
		t.Parts = slices.Clone(t.Parts)
		lists.Sort(t.Parts, func(a, b Part) int { return slices.Compare(a.Start, b.Start) })
		m.Tensors = append(m.Tensors, t)
	}
	return m, nil
}

// Commit writes the manifest and makes the checkpoint visible in one rename. Then, if only some
// are kept, it reads the new one back and removes the oldest.
func (d *Draft) Commit(ctx context.Context, meta Meta) error {
	if d.lock == nil {
		return diag.New(diag.BadUsage, "the draft is done with")
	}
	m, err := d.manifest(meta)
	if err != nil {
		return err
	}
	text, err := m.Encode()
	if err != nil {
		return err
	}
	if err := d.commit(text); err != nil {
		return unwritten(err, d.dir, d.step, m.Bytes())
	}
	defer d.Abort() // the temporary folder has another name now; this gives the lock back
	return d.retire(ctx)
}

// retire reads the new step back and removes the oldest ones. The step is saved by now: only its
// own damage is an error, old ones that stay are no reason to stop a run.
func (d *Draft) retire(ctx context.Context) error {
	list, err := steps(d.dir)
	if err == nil && (d.opts.Keep <= 0 || len(list) <= d.opts.Keep) {
		return nil
	}
	if err == nil {
		err = verifyAt(ctx, filepath.Join(d.dir, stepName(d.step)))
		if e := diag.From(err); e != nil && e.Code == diag.CheckpointDamaged {
			return e
		}
	}
	if err == nil {
		_, err = prune(ctx, d.dir, d.opts.Keep, verdicts{d.step: nil}, d.opts)
	}
	if e := diag.From(err); e != nil {
		d.opts.Events.Emit(event.Warning{Code: string(e.Code),
			Text: "old checkpoints stay: " + e.What, Fix: e.Fix})
	}
	return nil
}

// commit writes the manifest, renames the draft's folder to the step's name, which makes the
// checkpoint visible, and syncs the parent folder. Before the rename the checkpoint does not exist.
func (d *Draft) commit(text []byte) error {
	disk := d.opts.disk
	if err := d.bare(); err != nil {
		return err
	}
	if err := d.put(manifestName, text); err != nil {
		return err
	}
	if err := disk.rename(d.temp, filepath.Join(d.dir, stepName(d.step))); err != nil {
		return err
	}
	return disk.syncDir(d.dir)
}

package deepwell

import (
	"context"
	"errors"
	"io/fs"
	"os"
	"path/filepath"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
)

// ListCheckpoints tells of every checkpoint in a folder, oldest first, without hashing it.
func (e *Env) ListCheckpoints(ctx context.Context, dir string) ([]ckpt.Info, error) {
	v := e.begin(ctx, "ckpt list")
	list := get(v, "read the manifests", func() ([]ckpt.Info, error) { return checkpointsIn(dir) })
	return list, v.err
}

// VerifyCheckpoints hashes one checkpoint, or every one in a folder. Damaged ones carry their
// error in the list, and one error tells how many they are.
func (e *Env) VerifyCheckpoints(ctx context.Context, path string) ([]ckpt.Info, error) {
	v := e.begin(ctx, "ckpt verify")
	list := get(v, "read the manifests", func() ([]ckpt.Info, error) {
		if isStep(path) {
			return oneCheckpoint(path)
		}
		return checkpointsIn(path)
	})
	damaged := 0
	v.pass("hash every byte", func() error {
		for i := range list {
			if err := verify(ctx, &list[i]); err != nil {
				return err
			}
			if list[i].Err != nil {
				damaged++
			}
		}
		return nil
	})
	if v.err == nil && damaged > 0 {
		v.err = diag.New(diag.CheckpointDamaged, "%d of %d checkpoints are not whole", damaged,
			len(list)).At("%s", path).Try("a run resumes from the newest that is whole")
	}
	return list, v.err
}

// verify hashes a checkpoint that could be opened; what it finds is the list's, not the verb's.
func verify(ctx context.Context, info *ckpt.Info) error {
	if info.Err != nil {
		return nil
	}
	c, err := ckpt.Open(info.Path)
	if err == nil {
		err = errors.Join(c.Verify(ctx), c.Close())
	}
	if ctx.Err() != nil {
		return diag.New(diag.Canceled, "stopped while hashing %s", info.Path).Wrap(ctx.Err())
	}
	if err != nil {
		info.Err = diag.From(err)
	}
	return nil
}

// A CheckpointDiff is what differs between two checkpoints.
type CheckpointDiff struct {
	A       string            `json:"a"`
	B       string            `json:"b"`
	Tensors int               `json:"tensors"` // that were compared
	Equal   bool              `json:"equal"`   // bit by bit
	Differ  []ckpt.Difference `json:"differ"`
}

// DiffCheckpoints compares the tensors of two checkpoints; a folder of checkpoints stands for the
// newest in it.
func (e *Env) DiffCheckpoints(ctx context.Context, a, b string) (*CheckpointDiff, error) {
	v := e.begin(ctx, "ckpt diff")
	d := &CheckpointDiff{}
	ca := get(v, "open "+a, func() (*ckpt.Checkpoint, error) { return e.mustOpen(ctx, a) })
	cb := get(v, "open "+b, func() (*ckpt.Checkpoint, error) { return e.mustOpen(ctx, b) })
	v.pass("compare", func() (err error) {
		d.A, d.B = ca.Path(), cb.Path()
		names := map[string]bool{}
		for _, t := range append(ca.Tensors(), cb.Tensors()...) {
			names[t.Name] = true
		}
		d.Tensors = len(names)
		d.Differ, err = ckpt.Diff(ctx, ca, cb)
		d.Equal = err == nil && len(d.Differ) == 0
		return err
	})
	for _, c := range []*ckpt.Checkpoint{ca, cb} {
		if c != nil {
			_ = c.Close() // it was only read
		}
	}
	return d, v.err
}

// PruneCheckpoints removes the oldest checkpoints of a folder and tells which.
func (e *Env) PruneCheckpoints(ctx context.Context, dir string, keep int) ([]ckpt.Info, error) {
	v := e.begin(ctx, "ckpt prune")
	removed := get(v, "hash the newest, remove the oldest", func() ([]ckpt.Info, error) {
		return ckpt.Prune(ctx, stepsFolder(dir), keep, e.Events)
	})
	return removed, v.err
}

// mustOpen is openCheckpoint where nothing else will do.
func (e *Env) mustOpen(ctx context.Context, path string) (*ckpt.Checkpoint, error) {
	c, err := openCheckpoint(ctx, path, e)
	if err == nil && c == nil {
		err = diag.New(diag.CheckpointMissing, "%s is no checkpoint, and holds none", path)
	}
	return c, err
}

// stepsFolder is where the checkpoints are: a run keeps them below its own folder.
func stepsFolder(dir string) string {
	below := filepath.Join(dir, "checkpoints")
	if info, err := os.Stat(below); err == nil && info.IsDir() {
		return below
	}
	return dir
}

// isStep tells one checkpoint from a folder of them: by its manifest, or by its name if that is
// missing.
func isStep(path string) bool {
	if _, err := os.Lstat(filepath.Join(path, "manifest.json")); err == nil {
		return true
	}
	ok, err := filepath.Match("step-[0-9]*", filepath.Base(filepath.Clean(path)))
	return ok && err == nil
}

func oneCheckpoint(path string) ([]ckpt.Info, error) {
	c, err := ckpt.Open(path)
	if err != nil {
		return nil, err
	}
	info := ckpt.Info{Step: c.Step, Path: path, Bytes: c.Bytes(), Files: len(c.Files),
		Tensors: len(c.Manifest.Tensors)}
	return []ckpt.Info{info}, c.Close()
}

func checkpointsIn(dir string) ([]ckpt.Info, error) {
	if _, err := os.Stat(dir); errors.Is(err, fs.ErrNotExist) {
		return nil, diag.New(diag.CheckpointMissing, "there is no folder %s", dir).Wrap(err)
	}
	list, err := ckpt.List(stepsFolder(dir))
	if err == nil && len(list) == 0 {
		err = diag.New(diag.CheckpointMissing, "%s holds no checkpoint", dir).
			Try("give the folder that a run writes its checkpoints into")
	}
	return list, err
}

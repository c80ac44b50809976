package ckpt

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"strconv"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

const (
	stepPrefix = "step-"
	tempPrefix = ".tmp-" // a step that is being written
	oldPrefix  = ".old-" // a step that is being removed
	maxStep    = 1e15 - 1
)

// stepName is the folder of a step. Eight digits sort by name as by number up to 10⁸ steps; the
// package itself compares numbers.
func stepName(step int64) string { return fmt.Sprintf(stepPrefix+"%08d", step) }

func parseStep(name string) (int64, bool) {
	step, err := strconv.ParseInt(strings.TrimPrefix(name, stepPrefix), 10, 64)
	return step, err == nil && step >= 0 && step <= maxStep && stepName(step) == name
}

// steps lists the steps in a folder, newest first. A folder that is not there has none.
func steps(dir string) ([]int64, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", dir).Wrap(err)
	}
	var list []int64
	for _, e := range entries {
		if step, ok := parseStep(e.Name()); ok && e.IsDir() {
			list = append(list, step)
		}
	}
	slices.SortFunc(list, func(a, b int64) int { return cmp.Compare(b, a) })
	return list, nil
}

// clean removes what killed writers left. The caller holds the lock, so nobody is writing.
func clean(d disk, dir string) error {
	entries, err := os.ReadDir(dir)
	if err != nil {
		return err
	}
	for _, e := range entries {
		name, temp := strings.CutPrefix(e.Name(), tempPrefix)
		if !temp {
			name, temp = strings.CutPrefix(e.Name(), oldPrefix)
		}
		if _, ok := parseStep(name); !temp || !ok || !e.IsDir() {
			continue
		}
		if err := d.removeAll(filepath.Join(dir, e.Name())); err != nil {
			return err
		}
	}
	return nil
}

// Latest opens the newest checkpoint of a folder that is whole, every byte hashed. It steps back
// over damaged ones with a warning each. That there is none (CheckpointMissing) and that all are
// damaged (CheckpointDamaged) are different errors; a version that this binary does not know is
// not damage, and no reason to go back.
func Latest(ctx context.Context, dir string, events event.Sink) (*Checkpoint, error) {
	if events == nil {
		events = event.Discard
	}
	// A step can be pruned between the look at the folder and the opening; then look again.
	for attempt := 0; ; attempt++ {
		c, err := latest(ctx, dir, events)
		if errors.Is(err, errGone) && attempt < 3 {
			continue
		}
		return c, err
	}
}

var errGone = errors.New("the checkpoint was removed meanwhile")

func latest(ctx context.Context, dir string, events event.Sink) (*Checkpoint, error) {
	list, err := steps(dir)
	if err != nil {
		return nil, err
	}
	var first *diag.Error
	for _, step := range list {
		path := filepath.Join(dir, stepName(step))
		c, err := Open(path)
		if err == nil {
			if err = c.Verify(ctx); err == nil {
				return c, nil
			}
			_ = c.Close()
		}
		e := diag.From(err)
		if e.Code == diag.CheckpointMissing {
			return nil, fmt.Errorf("%w: %w", errGone, err)
		}
		if e.Code != diag.CheckpointDamaged {
			return nil, err
		}
		events.Emit(event.Warning{Code: string(e.Code),
			Text: fmt.Sprintf("step %d is damaged and passed over: %s", step, e.What)})
		if first == nil {
			first = e
		}
	}
	if first != nil {
		return nil, damaged("all %d checkpoints in %s are damaged", len(list), dir).
			Because("%s", first.What).Wrap(first)
	}
	return nil, diag.New(diag.CheckpointMissing, "%s holds no checkpoint", dir)
}

// An Info tells of one step without hashing it.
type Info struct {
	Step    int64       `json:"step"`
	Path    string      `json:"path"`
	Bytes   int64       `json:"bytes"`
	Files   int         `json:"files"`
	Tensors int         `json:"tensors"`
	Err     *diag.Error `json:"error,omitempty"` // why it cannot be opened
}

// List tells of every step in a folder, oldest first.
func List(dir string) ([]Info, error) {
	list, err := steps(dir)
	if err != nil {
		return nil, err
	}
	infos := make([]Info, 0, len(list))
	for _, step := range slices.Backward(list) {
		infos = append(infos, inform(dir, step))
	}
	return infos, nil
}

func inform(dir string, step int64) Info {
	info := Info{Step: step, Path: filepath.Join(dir, stepName(step))}
	c, err := Open(info.Path)
	if err != nil {
		info.Err = diag.From(err)
		return info
	}
	info.Bytes, info.Files, info.Tensors = c.Bytes(), len(c.Files), len(c.Manifest.Tensors)
	_ = c.Close()
	return info
}

// Prune removes the oldest checkpoints and keeps so many that can be opened, and tells which it
// removed. The newest of those kept is hashed first; if it is damaged the next takes its place,
// so the newest that is whole always stays. Damaged ones that are newer stay too, to be looked at;
// older ones go.
func Prune(ctx context.Context, dir string, keep int, events event.Sink) ([]Info, error) {
	if keep < 1 {
		return nil, diag.New(diag.BadUsage, "keep %d checkpoints? At least one stays", keep)
	}
	if events == nil {
		events = event.Discard
	}
	if _, err := os.Stat(dir); err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", dir).Wrap(err)
	}
	l, err := acquire(dir)
	if err != nil {
		return nil, pruneError(err, dir)
	}
	defer l.release()
	if err := clean(disk{}, dir); err != nil {
		return nil, pruneError(err, dir)
	}
	return prune(ctx, dir, keep, -1, Options{Events: events})
}

func pruneError(err error, dir string) error {
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return e
	}
	return diag.New(diag.CheckpointWrite, "cannot remove checkpoints from %s", dir).Wrap(err)
}

// prune works with the lock held; whole is a step that was hashed just now, or -1. If no checkpoint
// is whole it removes nothing and gives the oldest one's damage.
func prune(ctx context.Context, dir string, keep int, whole int64, o Options) (removed []Info,
	err error) {
	list, err := steps(dir)
	if err != nil || len(list) <= keep {
		return nil, err
	}
	kept := 0
	for i, step := range list {
		info := inform(dir, step)
		switch {
		case info.Err != nil && info.Err.Code != diag.CheckpointDamaged:
			continue // of another version, or not ours to read: left alone
		case kept == 0 && info.Err == nil && step != whole:
			info.Err = verdict(verifyAt(ctx, info.Path))
			if info.Err != nil && info.Err.Code != diag.CheckpointDamaged {
				return nil, info.Err
			}
		}
		switch {
		case kept == 0 && info.Err != nil:
			o.Events.Emit(event.Warning{Code: string(info.Err.Code),
				Text: fmt.Sprintf("step %d is damaged: %s", step, info.Err.What)})
			if i == len(list)-1 {
				return nil, info.Err
			}
		case info.Err == nil && kept < keep:
			kept++
		default:
			if err := discard(o.disk, dir, step); err != nil {
				return removed, pruneError(err, dir)
			}
			removed = append(removed, info)
		}
	}
	return removed, nil
}

// verdict is diag.From with a nil that stays nil in an interface.
func verdict(err error) *diag.Error {
	if err == nil {
		return nil
	}
	return diag.From(err)
}

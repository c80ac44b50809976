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
	"github.com/deepwell/deepwell/internal/lists"
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

// parseStep reads the step from the name of its folder.
func parseStep(name string) (int64, bool) {
	step, err := strconv.ParseInt(strings.TrimPrefix(name, stepPrefix), 10, 64)
	return step, err == nil && step >= 0 && step <= maxStep && stepName(step) == name
}

// steps lists the steps in a folder, newest first, by their names: one that is a link, or no
// folder, is reported when it is opened. A folder that is not there has none.
func steps(dir string) ([]int64, error) {
	entries, err := os.ReadDir(dir)
	if errors.Is(err, fs.ErrNotExist) {
		return nil, nil
	}
	if err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", dir).Wrap(err)
	}
	list := lists.Pick(entries, func(e os.DirEntry) (int64, bool) { return parseStep(e.Name()) })
	lists.Sort(list, func(a, b int64) int { return cmp.Compare(b, a) })
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
		name, _, _ = strings.Cut(name, ".") // a mark
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
// over damaged ones with a warning each. That there is no checkpoint (CheckpointMissing) and that
// all are damaged (CheckpointDamaged) are different errors; a version that this binary does not
// know is not damage, and no reason to go back.
func Latest(ctx context.Context, dir string, events event.Sink) (*Checkpoint, error) {
	events = cmp.Or(events, event.Discard)
	// A step can be pruned between the look at the folder and the opening; then look again.
	for attempt := 0; ; attempt++ {
		c, err := latest(ctx, dir, events)
		if !errors.Is(err, errGone) {
			return c, err
		}
		if attempt == 3 { // not CheckpointMissing: there are some, and a run must not begin anew
			return nil, diag.New(diag.FileError, "checkpoints vanish while they are opened").
				At("%s", dir).Wrap(err)
		}
	}
}

// errGone: another process pruned the checkpoint while it was read; the search begins again.
var errGone = errors.New("the checkpoint was removed meanwhile")

// latest is one attempt of [Latest].
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
		first = cmp.Or(first, e)
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

// inform describes a step from its manifest alone; nothing is hashed.
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

// Prune removes the oldest checkpoints and keeps the newest that can be opened; it returns which it
// removed. The newest of those kept is hashed first; if it is damaged the next takes its place,
// so the newest that is whole always stays. Damaged ones that are newer stay too, to be looked at;
// older ones go. A step that is a link was put elsewhere by somebody: it stays, with a warning.
func Prune(ctx context.Context, dir string, keep int, events event.Sink) ([]Info, error) {
	if keep < 1 {
		return nil, diag.New(diag.BadUsage, "keep %d checkpoints? At least one stays", keep)
	}
	if _, err := os.Stat(dir); err != nil {
		return nil, diag.New(diag.FileError, "cannot read %s", dir).Wrap(err)
	}
	return pruneFolder(ctx, dir, keep, Options{Events: cmp.Or(events, event.Discard)})
}

// pruneFolder hashes before it takes the lock, which a run may want, and looks with the lock
// whether there is a newer step now. A run that saves faster than this hashes has to wait at last.
func pruneFolder(ctx context.Context, dir string, keep int, o Options) ([]Info, error) {
	known := verdicts{}
	for attempt := 0; ; attempt++ {
		list, err := steps(dir)
		if err != nil {
			return nil, err
		}
		if len(list) > keep {
			if err := known.hash(ctx, dir, list); err != nil {
				return nil, err
			}
		}
		l, err := acquire(ctx, dir, o)
		if err != nil {
			return nil, pruneError(err, dir)
		}
		now, err := steps(dir)
		newer := err == nil && len(now) > 0 && (len(list) == 0 || now[0] > list[0])
		if newer && attempt < 3 {
			l.Release()
			continue
		}
		defer l.Release()
		if err := clean(o.disk, dir); err != nil {
			return nil, pruneError(err, dir)
		}
		return prune(ctx, dir, keep, known, o)
	}
}

// verdicts are the results of hashing steps just now, by step; nil means that a step is whole.
type verdicts map[int64]*diag.Error

// hash hashes steps, newest first, until one is whole.
func (v verdicts) hash(ctx context.Context, dir string, list []int64) error {
	for _, step := range list {
		info := inform(dir, step)
		if info.Err != nil {
			continue
		}
		if err := v.of(ctx, &info); err != nil {
			return err
		}
		if info.Err == nil {
			return nil
		}
	}
	return nil
}

// of hashes one step, unless that was done, and notes its damage. Another error is its own.
func (v verdicts) of(ctx context.Context, info *Info) error {
	e, ok := v[info.Step]
	if !ok {
		e = diag.From(verifyAt(ctx, info.Path))
		if e != nil && e.Code != diag.CheckpointDamaged {
			return e
		}
		v[info.Step] = e
	}
	info.Err = e
	return nil
}

// pruneError is the error of removing checkpoints, or of waiting for the folder's lock.
func pruneError(err error, dir string) error {
	if e, ok := errors.AsType[*diag.Error](err); ok {
		return e
	}
	if errors.Is(err, context.Canceled) || errors.Is(err, context.DeadlineExceeded) {
		return diag.New(diag.Canceled, "stopped while waiting for %s", dir).Wrap(err)
	}
	return diag.New(diag.CheckpointWrite, "cannot remove checkpoints from %s", dir).Wrap(err)
}

// prune works with the lock held. If no checkpoint is whole it removes nothing and gives the oldest
// one's damage.
func prune(ctx context.Context, dir string, keep int, known verdicts, o Options) (removed []Info,
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
		case kept == 0 && info.Err == nil:
			if err := known.of(ctx, &info); err != nil {
				return nil, err
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
		case isLink(info.Path):
			o.linked(step, info.Path)
		default:
			if err := discard(o.disk, dir, step); err != nil {
				return removed, pruneError(err, dir)
			}
			removed = append(removed, info)
		}
	}
	return removed, nil
}

func isLink(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && info.Mode()&fs.ModeSymlink != 0
}

func isFile(path string) bool {
	info, err := os.Lstat(path)
	return err == nil && !info.IsDir()
}

// linked tells of a step that stays because it is a link. A run that prunes after every save does
// not tell it every time.
func (o *Options) linked(step int64, path string) {
	if o.Keep == 0 {
		o.Events.Emit(event.Warning{Code: string(diag.CheckpointLink), Text: fmt.Sprintf(
			"step %d stays: it is a link", step), Fix: "remove " + path + " and what it leads to by hand"})
	}
}

package train

import (
	"context"
	"fmt"
	"path/filepath"
	"time"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/lists"
)

// The waits before a save that failed is tried again. A disk that is full or out of file handles is
// often only so for seconds. A periodic save may fail, since the next one tries again; the last one
// of a run loses steps if it does, so it waits longer.
var (
	periodicWaits = []time.Duration{time.Second, 4 * time.Second}
	lastWaits     = []time.Duration{time.Second, 4 * time.Second, 15 * time.Second, 40 * time.Second,
		time.Minute}
)

// Save writes a checkpoint of the steps that were done into Recipe.Out/checkpoints, unless it is
// there, and removes older ones than the recipe's save.keep. A disk that fails is tried again for
// two minutes. After a rejected step the state is the one before it.
func (t *Trainer) Save(ctx context.Context) error {
	if err := t.usable(); err != nil {
		return err
	}
	return t.save(ctx, true)
}

// save writes a checkpoint of the steps that were done. Unless it is the run's last, a checkpoint
// that cannot be written is a warning and the run goes on. All processes decide alike, by the error
// that all of them get ([Trainer.together]).
func (t *Trainer) save(ctx context.Context, last bool) error {
	t.opts.Events.Emit(event.Busy{Task: fmt.Sprintf("saving step %d", t.step)})
	waits := periodicWaits
	if last {
		waits = lastWaits
	}
	err := t.saveTo(ctx, t.folder(), t.opts.Recipe.Save.Keep, waits)
	if err == nil || last || !writeFailed(err) {
		return err
	}
	if !t.opts.Processes.Leads() {
		return nil
	}
	e := diag.From(err)
	since := "nothing is saved yet"
	if t.saved >= 0 {
		since = fmt.Sprintf("nothing is saved since step %d", t.saved)
	}
	t.opts.Events.Emit(event.Warning{Code: string(e.Code), Text: fmt.Sprintf(
		"step %d is not saved, %s: %s; the run goes on and tries again at the next save", t.step, since,
		explain(e)), Fix: e.Fix})
	return nil
}

// explain prints an error and its cause in one line.
func explain(e *diag.Error) string {
	if e.Cause == "" {
		return e.What
	}
	return e.What + " (" + e.Cause + ")"
}

// writeFailed tells an error of the disk, which may pass, from an error of the state or of a link
// to another process, which ends the run.
func writeFailed(err error) bool {
	switch diag.From(err).Code {
	case diag.CheckpointWrite, diag.CheckpointBusy, diag.FileError,
		diag.CheckpointDamaged: // a new checkpoint that reads back wrong
		return true
	}
	return false
}

// saveTo writes a checkpoint into a folder, the run's own or a rejected step's. It is tried
// once, and once more after each of the waits.
func (t *Trainer) saveTo(ctx context.Context, dir string, keep int, waits []time.Duration) error {
	defer t.phase(phaseSave)()
	defer t.span("save")()
	start := t.opts.Now()
	// What is saved is fixed here; a retry writes the same bytes.
	m, err := t.manifest()
	if err != nil {
		return err
	}
	own := dir == t.folder()
	// A run that is asked to stop where it was just saved has nothing to write. Before its first step
	// only the processes that see the folder know of it.
	fresh, err := t.exec.peers.any(ctx, !own || t.saved != t.step)
	if err != nil || !fresh {
		return err
	}
	if err := t.checkReplicas(ctx); err != nil {
		return err
	}
	s := t.snapshot(ctx)
	err = t.write(ctx, dir, keep, m, s, waits)
	if err != nil {
		if !own && diag.From(err).Code == diag.CheckpointExists {
			return nil // a step that was rejected before the run was stopped and resumed, too
		}
		return err
	}
	if own {
		t.saved = t.step
	}
	if !t.opts.Processes.Leads() {
		return nil
	}
	t.opts.Events.Emit(event.Saved{Step: t.step, Path: filepath.ToSlash(dir), Bytes: bytesOfAll(s),
		Seconds: t.opts.Now().Sub(start).Seconds()})
	return nil
}

// write makes the attempts of saveTo: of this process alone, or of all processes together.
func (t *Trainer) write(ctx context.Context, dir string, keep int, m ckpt.Meta, s *snapshot,
	waits []time.Duration) error {
	put := t.hooks.put
	switch {
	case put != nil:
	case t.exec.peers != nil:
		put = t.together
	default:
		put = ckpt.Save
	}
	for try := 0; ; try++ {
		// Each attempt has a save's time before the watchdog calls it a stall.
		end := t.phase(phaseSave)
		err := put(ctx, dir, int64(t.step), m, s, ckpt.Options{Keep: keep, Events: t.opts.Events,
			Workers: s.writers()})
		end()
		switch {
		case err == nil:
			return nil
		case try == len(waits) || !writeFailed(err):
			return err
		}
		if e := diag.From(err); t.opts.Processes.Leads() {
			t.opts.Events.Emit(event.Warning{Code: string(e.Code), Text: fmt.Sprintf(
				"step %d is not saved yet: %s; trying again in %s", t.step, explain(e), waits[try]),
				Fix: e.Fix})
		}
		t.opts.Sleep(waits[try])
		s.rewind()
	}
}

// bytesOfAll is the size of all tensors of a source.
func bytesOfAll(s ckpt.Source) (bytes int64) {
	return lists.Sum(s.Tensors(), func(one ckpt.Tensor) int64 { return one.Bytes() })
}

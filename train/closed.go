package train

import (
	"os"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/internal/flock"
)

// usable returns why the trainer can only be closed; nil while it can be used.
func (t *Trainer) usable() error {
	if t.spent == nil { // a nil *diag.Error must not become an error
		return nil
	}
	return t.spent
}

// abandon marks the trainer as closed for everything but Close, after an error that may have left
// the state between two steps, or transfers between pipeline ranks unread. The first reason stays.
func (t *Trainer) abandon(err error, format string, args ...any) {
	if t.spent == nil {
		t.spent = diag.New(diag.TrainerClosed, format, args...).Because("%v", err).
			Try("close the trainer; a new one resumes from the newest checkpoint")
	}
}

// lockFolder makes the run's folder and locks it until Close: two runs in one folder would mix
// their checkpoints. Of several processes the leader locks it.
func (t *Trainer) lockFolder() (err error) {
	out := t.opts.Recipe.Out
	switch {
	case out == "":
		return diag.New(diag.BadInput, "the recipe has no folder for checkpoints").
			At("train.Options.Recipe").Try("set Recipe.Out")
	case t.opts.Locked || !t.opts.Processes.Leads():
		return nil
	}
	if err := os.MkdirAll(out, 0o777); err != nil {
		return diag.New(diag.FileError, "cannot make the run's folder").At("%s", out).Wrap(err)
	}
	if t.lock, err = flock.Run(out); err != nil {
		return err
	}
	if !t.lock.Firm() {
		t.opts.Events.Emit(event.Warning{Code: string(diag.RunBusy), Text: flock.Loose(out),
			Fix: "start the run only once, or put it on another disk"})
	}
	return nil
}

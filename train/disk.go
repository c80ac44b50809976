package train

import (
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"golang.org/x/sys/unix"

	"github.com/deepwell/deepwell/ckpt"
	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
	"github.com/deepwell/deepwell/recipe"
	"github.com/deepwell/deepwell/step"
)

// A DiskCheck is the input of [FitsDisk]. The run's folder exists.
type DiskCheck struct {
	Recipe *recipe.Recipe
	Until  int                             // as in Options
	Free   func(dir string) (int64, error) // free bytes of the disk that has dir
	Events event.Sink
}

// FitsDisk returns an error if the run's folder cannot be written, or if its disk lacks room for
// the checkpoints that the run holds at once. An old checkpoint is removed only after a newer one
// is complete, so there is one more than save.keep for a while. Checkpoints that exist count as
// written.
func FitsDisk(p *step.Programs, c DiskCheck) error {
	out := c.Recipe.Out
	dir := filepath.Join(out, "checkpoints")
	for _, one := range []string{out, dir} {
		if err := writable(one); err != nil {
			return err
		}
	}
	// Room is needed for the checkpoints that will exist at once, not for all that are written.
	size := checkpointBytes(p)
	there, err := ckpt.List(dir)
	if err != nil {
		return err
	}
	saves, more := c.saves(there)
	if saves == 0 {
		return nil
	}
	free, err := c.Free(out)
	if err != nil {
		return nil //nolint:nilerr // some file systems do not tell; the first save will
	}
	if need := more * size; free < need {
		plural := ""
		if more > 1 {
			plural = fmt.Sprintf("%d of ", more)
		}
		return diag.New(diag.HostDisk, "checkpoints need %s, and the disk has %s left", event.Size(need),
			event.Size(free)).At("%s", out).
			Because("save.keep = %d needs room for %s%s more than are there, %d", c.Recipe.Save.Keep,
				plural, event.Size(size), len(there)).
			Try("%smake room, or use another disk: --set out=NAME", c.fewer(there, free/size))
	}
	// With save.keep = 0 nothing is removed. That the disk fills up later is a warning: the run may be
	// meant to stop before.
	if all := int64(saves); c.Recipe.Save.Keep == 0 && free < all*size {
		c.Events.Emit(event.Warning{Code: string(diag.HostDisk), Text: fmt.Sprintf(
			"save.keep = 0 keeps all %d checkpoints of %s, and the disk has room for %d", saves,
			event.Size(size), free/size), Fix: "set save.keep, a larger save.every, or make room"})
	}
	return nil
}

// fewer suggests save.keep = 1 if that would fit.
func (c *DiskCheck) fewer(there []ckpt.Info, fits int64) string {
	r := *c.Recipe
	r.Save.Keep = 1
	least := &DiskCheck{Recipe: &r, Until: c.Until}
	if _, more := least.saves(there); c.Recipe.Save.Keep != 1 && more <= fits {
		return "save.keep = 1, "
	}
	return ""
}

// saves returns how many checkpoints the run still writes, and how many more than exist it holds at
// once.
func (c *DiskCheck) saves(there []ckpt.Info) (saves int, more int64) {
	// The run resumes from the newest checkpoint, and saves at multiples of save.every and at the end.
	r, step := c.Recipe, 0
	if len(there) > 0 {
		step = int(there[len(there)-1].Step)
	}
	end := r.Steps
	if c.Until > 0 {
		end = min(c.Until, end)
	}
	if step >= end {
		return 0, 0
	}
	saves = 1 // the last
	if r.Save.Every > 0 {
		saves += (end-1)/r.Save.Every - step/r.Save.Every
	}
	if r.Save.Keep == 0 {
		return saves, int64(min(saves, 2))
	}
	return saves, int64(max(1, min(len(there)+saves, r.Save.Keep+1)-len(there)))
}

// manifestBytes is an upper bound of the manifest's bytes for one tensor.
const manifestBytes = 1 << 10

// checkpointBytes is the size of one checkpoint.
func checkpointBytes(p *step.Programs) (bytes int64) {
	// Checkpoints are not compressed, and store a shared parameter once.
	seen := map[string]bool{}
	for _, pc := range stateTensors(p) {
		if !seen[pc.name] { // two ranks may have it
			bytes += pc.bytes() + manifestBytes*int64(len(pc.tensors))
		}
		seen[pc.name] = true
	}
	return bytes
}

// writable creates and removes a file in a folder. A folder that does not exist is made by the
// first save, in its parent.
func writable(dir string) error {
	// Permissions alone do not say it: the file system may be full, over quota or read-only.
	f, err := os.CreateTemp(dir, ".deepwell-probe-*")
	if errors.Is(err, fs.ErrNotExist) {
		if _, gone := os.Lstat(dir); errors.Is(gone, fs.ErrNotExist) {
			return nil
		}
	}
	if err == nil {
		_, err = f.WriteString("deepwell\n")
		err = errors.Join(err, f.Close(), os.Remove(f.Name()))
	}
	if err == nil {
		return nil
	}
	e := diag.New(diag.HostDisk, "the run's folder cannot be written").At("%s", dir).Wrap(err)
	if errors.Is(err, unix.ENOSPC) || errors.Is(err, unix.EDQUOT) {
		return e.Try("the disk is full: make room, or use another disk: --set out=NAME")
	}
	return e.Try("give the run a folder that this user may write: --set out=NAME")
}

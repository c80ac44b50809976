package plugin

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/event"
)

// A source brings one wheel, checked against its pin. done is called when the file is no longer
// needed.
type source func(ctx context.Context, w wheel, p pin) (path string, done func(), err error)

// source decides between files and pip.
func (in *Installer) source(ctx context.Context, temp string) (source, error) {
	if len(in.From) > 0 {
		return in.fromFiles()
	}
	pip, err := in.findPip(ctx)
	if err != nil {
		return nil, err
	}
	return func(ctx context.Context, w wheel, p pin) (string, func(), error) {
		dir, err := os.MkdirTemp(temp, "pip-")
		if err != nil {
			return "", nil, cannotWrite(err)
		}
		done := func() { _ = os.RemoveAll(dir) }
		path, err := in.download(ctx, pip, w, p, dir)
		if err == nil {
			err = checkWheel(ctx, path, w, p)
		}
		if err != nil {
			done()
			return "", nil, err
		}
		return path, done, nil
	}, nil
}

// fromFiles lists the wheels of From once and finds each wheel by the name that every index gives
// it: NAME-VERSION-TAGS.whl. A folder may hold wheels for several hosts and engines.
func (in *Installer) fromFiles() (source, error) {
	var paths []string
	for _, from := range in.From {
		info, err := os.Stat(from)
		if err != nil {
			return nil, cannotRead(from, err)
		}
		if !info.IsDir() {
			paths = append(paths, from)
			continue
		}
		entries, err := os.ReadDir(from)
		if err != nil {
			return nil, cannotRead(from, err)
		}
		for _, entry := range entries {
			paths = append(paths, filepath.Join(from, entry.Name()))
		}
	}
	return func(ctx context.Context, w wheel, p pin) (string, func(), error) {
		var failed error
		for _, path := range paths {
			if !w.isFile(filepath.Base(path)) {
				continue
			}
			err := checkWheel(ctx, path, w, p)
			if err == nil {
				return path, func() {}, nil
			}
			failed = cmp.Or(failed, err)
		}
		if failed == nil {
			failed = diag.New(diag.BadInput, "the given files hold no wheel of %s", w.spec()).
				At("%s", strings.Join(in.From, ", ")).
				Try("where there is a network: pip download --no-deps --only-binary=:all: %s", w.spec())
		}
		return "", nil, failed
	}, nil
}

// isFile reports whether a file of that name should be the wheel. In the name of a wheel a run
// of -, _ and . in the package's name is one _ (the specification of wheel file names).
func (w wheel) isFile(name string) bool {
	prefix := strings.ReplaceAll(w.Name, "-", "_") + "-" + w.Version + "-"
	return strings.HasPrefix(strings.ToLower(name), prefix) && strings.HasSuffix(name, ".whl")
}

// checkWheel holds the digest of a wheel against its pin.
func checkWheel(ctx context.Context, path string, w wheel, p pin) error {
	got, _, err := hashFile(ctx, path)
	switch {
	case ctx.Err() != nil:
		return canceled(ctx.Err(), "checking %s", filepath.Base(path))
	case err != nil:
		return cannotRead(path, err)
	case got != p.SHA256:
		return diag.New(diag.EngineDigest, "%s has another SHA-256 than the pinned one",
			filepath.Base(path)).At("%s", path).
			Because("want %.12s, got %.12s", p.SHA256, got).
			Try("fetch %s again; if it stays so, whoever serves it changed it", w.spec())
	}
	return nil
}

func cannotRead(path string, err error) *diag.Error {
	return diag.New(diag.FileError, "cannot read %s", filepath.Base(path)).At("%s", path).Wrap(err)
}

// findPip returns the command that runs the user's pip.
func (in *Installer) findPip(ctx context.Context) ([]string, error) {
	if len(in.Pip) > 0 {
		return in.Pip, nil
	}
	for _, command := range [][]string{{"python3", "-m", "pip"}, {"pip3"}, {"pip"}} {
		if _, err := exec.LookPath(command[0]); err != nil {
			continue
		}
		// A python without the pip module is common, so being on PATH is not enough.
		args := append(command[1:len(command):len(command)], "--version")
		if exec.CommandContext(ctx, command[0], args...).Run() == nil {
			return command, nil
		}
	}
	if err := ctx.Err(); err != nil {
		return nil, canceled(err, "looking for pip")
	}
	return nil, diag.New(diag.EngineDownload, "there is no pip to download with").
		Because("neither python3 -m pip nor pip works").
		Try("install Python's pip, or give the wheels with --from FILE")
}

// pipGrace is how long a killed pip has to let go of its output.
const pipGrace = 2 * time.Second

// download has pip fetch one wheel into dir and returns its path. pip keeps its unfinished file
// in TMPDIR, which is set to dir too: the growth of dir is the progress.
func (in *Installer) download(
	ctx context.Context, pip []string, w wheel, p pin, dir string,
) (string, error) {
	args := append(pip[1:len(pip):len(pip)], "download", "--no-deps", "--only-binary=:all:",
		"--dest", dir, w.spec())
	cmd := exec.CommandContext(ctx, pip[0], args...)
	cmd.Env = append(os.Environ(), "TMPDIR="+dir, "PIP_DISABLE_PIP_VERSION_CHECK=1",
		"PIP_NO_INPUT=1", "PIP_PROGRESS_BAR=off")
	var output bytes.Buffer
	cmd.Stdout, cmd.Stderr = &output, &output
	// pip may have children; a group of its own lets a cancel end them all.
	cmd.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	cmd.Cancel = func() error { return syscall.Kill(-cmd.Process.Pid, syscall.SIGKILL) }
	cmd.WaitDelay = pipGrace

	stop := in.watch(dir, w, p)
	err := cmd.Run()
	stop()
	if ctx.Err() != nil {
		return "", canceled(ctx.Err(), "downloading %s", w.spec())
	}
	failed := diag.New(diag.EngineDownload, "pip cannot download %s", w.spec()).
		At("%s", strings.Join(cmd.Args, " ")).
		Try("mend pip's settings, or fetch the wheel elsewhere and give it with --from FILE")
	if err != nil {
		return "", failed.Because("%s", lastLines(output.String(), err)).Wrap(err)
	}
	found, err := filepath.Glob(filepath.Join(dir, "*.whl"))
	if err != nil || len(found) != 1 {
		return "", failed.Because("pip left %d wheels", len(found)).Wrap(err)
	}
	return found[0], nil
}

// progressEvery is how often a download's progress is reported.
const progressEvery = 200 * time.Millisecond

// watch tells how much of a wheel is in dir until the returned function is called.
func (in *Installer) watch(dir string, w wheel, p pin) (stop func()) {
	tell := func(done int64) {
		in.emit(event.Progress{Task: "download " + w.spec(), Done: min(done, p.Bytes),
			Total: p.Bytes, Unit: "B"})
	}
	tell(0)
	quit := make(chan struct{})
	var wg sync.WaitGroup
	wg.Go(func() {
		tick := time.NewTicker(progressEvery)
		defer tick.Stop()
		for {
			select {
			case <-quit:
				return
			case <-tick.C:
				tell(sizeOf(dir))
			}
		}
	})
	return func() {
		close(quit)
		wg.Wait()
	}
}

// sizeOf adds up the files below dir; files come and go while pip runs, so errors are skipped.
func sizeOf(dir string) (total int64) {
	_ = filepath.WalkDir(dir, func(_ string, d fs.DirEntry, err error) error {
		if err != nil || !d.Type().IsRegular() {
			return nil
		}
		if info, err := d.Info(); err == nil {
			total += info.Size()
		}
		return nil
	})
	return total
}

// lastLines gives what pip said last, which is where it says why.
func lastLines(output string, err error) string {
	const most = 6
	lines := strings.FieldsFunc(output, func(r rune) bool { return r == '\n' || r == '\r' })
	if len(lines) == 0 {
		if errors.Is(err, fs.ErrNotExist) || errors.Is(err, exec.ErrNotFound) {
			return "pip is not there"
		}
		return fmt.Sprintf("pip said nothing (%v)", err)
	}
	return strings.Join(lines[max(0, len(lines)-most):], "\n")
}

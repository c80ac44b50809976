package plugin

import (
	"context"
	"errors"
	"os"
	"path/filepath"
	"slices"
	"strings"

	"github.com/deepwell/deepwell/diag"
	"github.com/deepwell/deepwell/internal/lists"
)

// DefaultDir is the folder that engines are installed in: $DEEPWELL_HOME/engines, else
// $XDG_DATA_HOME/deepwell/engines, else ~/.local/share/deepwell/engines. getenv is os.Getenv.
func DefaultDir(getenv func(string) string) (string, error) {
	if home := getenv("DEEPWELL_HOME"); home != "" {
		abs, err := filepath.Abs(home)
		if err != nil {
			return "", cannotWrite(err)
		}
		return filepath.Join(abs, "engines"), nil
	}
	// The XDG Base Directory Specification wants a relative path to be ignored.
	if data := getenv("XDG_DATA_HOME"); filepath.IsAbs(data) {
		return filepath.Join(data, "deepwell", "engines"), nil
	}
	if home := getenv("HOME"); home != "" {
		return filepath.Join(home, ".local", "share", "deepwell", "engines"), nil
	}
	return "", diag.New(diag.EngineWrite, "there is no home folder to keep engines in").
		Try("set DEEPWELL_HOME")
}

// Names lists the engines that can be installed, in the order that people should read them.
func Names() []string { return builtin().names() }

func (c *catalogue) names() []string {
	return lists.Map(c.engines, func(e engine) string { return e.name })
}

// find looks a name up in the table and makes sure that the engine is pinned for this host.
func (c *catalogue) find(name string) (*engine, error) {
	for i := range c.engines {
		if e := &c.engines[i]; e.name == name {
			if _, pinned := e.trees[c.host]; !pinned {
				return nil, diag.New(diag.EngineHost, "engine %q is not available for %s", name, c.host).
					Try("use a %s host", strings.Join(e.hosts(), " or "))
			}
			return e, nil
		}
	}
	err := diag.New(diag.EngineUnknown, "no engine is called %q", name).
		Try("use one of %s", strings.Join(c.names(), ", "))
	// People ask for what they have; "gpu" is one letter from "cpu".
	near := map[string]string{"gpu": "cuda13-run", "cuda": "cuda13", "nvidia": "cuda13-run"}[name]
	if near == "" {
		near = diag.Nearest(name, c.names())
	}
	if slices.Contains(c.names(), near) {
		err.What += "; did you mean \"" + near + "\"?"
	}
	return nil, err
}

// hosts lists what an engine is pinned for.
func (e *engine) hosts() []string {
	var hosts []string
	for _, host := range []string{amd64, arm64} {
		if _, pinned := e.trees[host]; pinned {
			hosts = append(hosts, host)
		}
	}
	return hosts
}

// packages lists the wheels of an engine as pip spells them.
func (e *engine) packages() []string {
	return lists.Map(e.wheels, func(w wheel) string { return w.spec() })
}

func (w wheel) spec() string { return w.Name + "==" + w.Version }

// A Status tells about one engine without verifying it.
type Status struct {
	Name      string   `json:"name"`
	Version   string   `json:"version"`
	Purpose   string   `json:"purpose"`
	Packages  []string `json:"packages"`          // as pip spells them
	Available bool     `json:"available"`         // pinned for this host
	Installed bool     `json:"installed"`         // this very release is on disk; Open verifies it
	Bytes     int64    `json:"bytes"`             // on disk, if installed
	Download  int64    `json:"download"`          // bytes to fetch, if not
	Digest    string   `json:"digest"`            // SHA-256 of the tree, as pinned
	Exposed   string   `json:"exposed,omitempty"` // why Open refuses it: who else can change it
}

// List tells about every engine. It reads manifests only; nothing is hashed.
func List(dir string) ([]Status, error) { return builtin().list(dir) }

func (c *catalogue) list(dir string) ([]Status, error) {
	if info, err := os.Stat(dir); err == nil && !info.IsDir() {
		return nil, diag.New(diag.FileError, "%s is not a folder", dir)
	} else if err != nil && !errors.Is(err, os.ErrNotExist) {
		return nil, diag.New(diag.FileError, "cannot read the engine folder").At("%s", dir).Wrap(err)
	}
	var all []Status
	for _, e := range c.engines {
		tree, pinned := e.trees[c.host]
		s := Status{Name: e.name, Version: e.version, Purpose: e.purpose, Packages: e.packages(),
			Available: pinned, Digest: tree}
		for _, w := range e.wheels {
			s.Download += w.Pins[c.host].Bytes
		}
		// An unreadable manifest means "not installed" here; Open gives the reason.
		if m, err := readManifest(filepath.Join(dir, e.name)); err == nil && treeDigest(m.Files) == tree {
			s.Installed, s.Bytes = true, m.bytes()
			if err := checkOwners(dir, filepath.Join(dir, e.name)); err != nil {
				s.Exposed = diag.From(err).What
			}
		}
		all = append(all, s)
	}
	return all, nil
}

// Remove deletes an installed engine. It does not wait for an installation that is under way.
func Remove(dir, name string) error { return builtin().remove(dir, name) }

func (c *catalogue) remove(dir, name string) error {
	e, err := c.find(name)
	if err != nil {
		return err
	}
	folder := filepath.Join(dir, name)
	if _, err := os.Lstat(folder); errors.Is(err, os.ErrNotExist) {
		return missing(e, folder)
	}
	now, cancel := context.WithCancel(context.Background())
	cancel()
	held, err := acquire(now, dir, name, func(int) {})
	if err != nil {
		return err
	}
	defer held.release()
	_ = os.Remove(recordPath(dir, name)) // of files that are gone
	if err := retire(dir, name); err != nil {
		return cannotWrite(err)
	}
	return sweep(dir, name)
}
